"""What is compared: the rows of the table."""

from dataclasses import dataclass

PEERS = (
    *("labkit", "ipyparallel", "monarch", "nbdistributed", "jupyter-distributed"),
    *("accelerate", "torchrun"),
)
"""In the order of the columns."""


@dataclass(frozen=True)
class Row:
    """One of them."""

    key: str
    title: str
    unit: str
    """"" where it is words."""
    limit: str = ""
    """The physical limit beside it, as `machine.limits` names it."""
    is_more_better: bool = False
    why: str = ""
    """Why labkit is not first, where it is not."""
    is_failure: bool = False

    @property
    def is_compared(self) -> bool:
        """Whether one can be first."""
        return bool(self.unit) and self.key not in OURS


OURS = ("log_cost", "log_latency")
TRIVIAL = (
    "A labkit cell is signed, checked before it runs, and answered with its "
    "outcome on every rank, so that a failure elsewhere ends it; Monarch sends a "
    "message to actors that already wait, from Rust."
)
TRAINING = (
    "labkit's hooks and records take CPU time of each rank's main thread in every step "
    "([how much](benchmarks.md)), and another process draws the live picture, which "
    "here shares two cores with the ranks."
)
PREPARED = (
    "The script applies the strategy by hand, with no checks. After `prepare`, labkit "
    "checks in every step that the ranks do the same work, and draws the picture "
    "beside them. ZeRO's buckets hold an eighth of the model's elements, and at least "
    "262,144, so that the memory picture shows the stage; the script uses DeepSpeed's "
    "default, one bucket."
)
FASTER_LAUNCH = (
    "`notebook_launcher` forks ranks from a kernel that has torch, and ends them with "
    "the cell: quick to start, and nothing is kept."
)
NOTHING_TO_KEEP = (
    "Tools whose ranks end with each launch have nothing to keep, and a failure ends "
    "the launch."
)
NEXT_LIMIT_S = 10.0
"""The first cell after a failure; a script takes seconds to start."""
WHAT_FAILS = {
    "raise": "one rank raises, others in all_reduce",
    "kill": "`kill -9` of a rank, others in all_reduce",
    "interrupt": "interrupt inside collectives",
}
FAILURE_WHY = {
    "raise": NOTHING_TO_KEEP,
    "kill": (
        "The fastest tool ends the cell as soon as a connection breaks, without naming "
        "the cause, and takes longer until the next cell works."
    ),
    "interrupt": (
        "The fastest tool ends the cell and leaves its ranks in the collective, or "
        "ends them; labkit's cell ends when every rank is out of it."
    ),
}

ROWS = (
    Row(
        "start_2",
        "start to a cell that all-reduces, 2 ranks",
        "s",
        "import_torch",
        why=f"{FASTER_LAUNCH} Monarch, nbdistributed and jupyter-distributed start no "
        "controller and no watchdog.",
    ),
    Row("start_8", "the same, 8 ranks", "s", "import_torch", why=FASTER_LAUNCH),
    Row("start_16", "the same, 16 ranks", "s", "import_torch", why=FASTER_LAUNCH),
    Row(
        "edit",
        "a training cell edited, to its first step",
        "s",
        "loopback",
        why="`%%dist_train` prepares a run before its first step: its folder, its "
        "record files and its picture. The others run the cell, and nothing more.",
    ),
    Row("cell_2", "a trivial cell, 2 ranks", "s", "loopback", why=TRIVIAL),
    Row("cell_8", "the same, 8 ranks", "s", "loopback", why=TRIVIAL),
    Row("cell_16", "the same, 16 ranks", "s", "loopback", why=TRIVIAL),
    *(
        Row(
            f"{verb}_{size}",
            f"{verb} {size} MB {way}",
            "s",
            f"memcpy_{size}",
            why="labkit sends up to 128 KiB encrypted through its controller; what is "
            "larger goes through memory, or a file, that only the user's processes can "
            "open, and is copied twice. Monarch and ipyparallel do not encrypt by "
            "default; what `notebook_launcher` forks has the array already.",
        )
        for verb, way in (("push", "to 2 ranks"), ("pull", "from a rank"))
        for size in (1, 100)
    ),
    *(
        Row(
            f"steps_{size}",
            f"steps of a DDP loop, about {size} ms each",
            "steps/s",
            f"matmul_{size}",
            is_more_better=True,
            why=TRAINING,
        )
        for size in (2, 10)
    ),
    *(
        Row(
            f"{strategy}_{size}",
            f"the loop of about {size} ms under {strategy}, after `prepare` or by hand",
            "steps/s",
            f"matmul_{size}",
            is_more_better=True,
            why=PREPARED,
        )
        for size in (2, 10)
        for strategy in ("ddp", "fsdp", "zero2")
    ),
    Row(
        "gpt2_tokens",
        "GPT-2 124M in bf16 on GPUs, with DDP, 200 steps",
        "tokens/s",
        is_more_better=True,
        why="labkit measures memory and collectives in two of the 200 steps, each of "
        "which takes about three times as long; in a thousand steps it is four.",
    ),
    Row(
        "gpt2_median",
        "the same, by the median step",
        "tokens/s",
        is_more_better=True,
        why=TRAINING,
    ),
    Row(
        "gpt2_mfu",
        "share of the GPUs' peak (MFU)",
        "%",
        is_more_better=True,
        why=TRAINING,
    ),
    Row("log_cost", "one `log(loss=...)`", "s"),
    Row("log_latency", "from `log` to the picture", "s"),
    Row(
        "memory_rank",
        "memory of a rank (PSS)",
        "MB",
        "pss_torch",
        why="A rank of labkit's has IPython, ipyparallel and labkit loaded beside "
        "torch, for cells, records and diagnoses.",
    ),
    Row(
        "memory_kernel",
        "memory of the kernel (PSS)",
        "MB",
        why="labkit loads pandas and matplotlib into the kernel.",
    ),
    Row(
        "memory_all",
        "memory of everything (PSS)",
        "MB",
        why="The sum of the parts above.",
    ),
    Row(
        "processes",
        "processes beside ranks and kernel",
        "processes",
        why="ipyparallel's controller, the process from which ranks are forked, the "
        "one that draws the pictures, and a watchdog that imports nothing, so that it "
        "outlives the others and nothing is left behind.",
    ),
    *(
        row
        for kind, what in WHAT_FAILS.items()
        for row in (
            Row(
                f"{kind}_prompt",
                f"{what}: to the prompt",
                "s",
                why=FAILURE_WHY[kind],
                is_failure=True,
            ),
            Row(
                f"{kind}_next",
                "from there until a cell works",
                "s",
                why=NOTHING_TO_KEEP,
                is_failure=True,
            ),
            Row(f"{kind}_state", "variables", "", is_failure=True),
        )
    ),
)
BY_KEY = {row.key: row for row in ROWS}
