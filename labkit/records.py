"""What crosses from rank to notebook: the one shared vocabulary."""

import shlex
import struct
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from dataclasses import replace
from typing import Any

import numpy as np

from labkit import timeouts

SAFE_PATH = {"PYTHONSAFEPATH": "labkit"}
"""Python imports nothing from the working directory, where a random.py would be taken
for the library's: the environment of an engine until it has started."""
HOST_VARIABLE = "LABKIT_HOST"
"""The name of its host in the environment of an engine on another than the notebook's.
"""
AGENT_VARIABLE = "LABKIT_AGENT"
"""JSON, in the environment of an agent: what engines have in theirs, the folder in
which they begin, and those of the agents before it."""
KEY = "labkit"
"""The metadata key of a request, the name of a published message, and the prefix of
the control requests that labkit adds to an engine."""

FUNCTION_NAME = "__labkit_function__"
"""What a function from the notebook is called by on a rank."""

SERVE_NAME = "__labkit_serve__"
"""What a rank that serves the others calls in place of the cell."""

RANK_NAMES = ("rank", "local_rank", "world_size", "device", "torch", "dist")
"""The variables that every cell finds on every rank, set again for each."""

NOTICED_LOSS = "(noticed loss)"
"""The metric of losses that were given to `backward()`; it is the run's `loss` unless
the cell logs one itself."""

STEP_TAKEN = "(step taken)"
"""The metric that notes an optimizer step for which no loss was noticed; the history
has its memory alone."""

NO_STEPS = (
    "the loop has called backward(), and no optimizer of torch.optim has taken a step, "
    "so there is nothing to plot. Call optimizer.step(); or, with updates of your own, "
    "log(loss=loss.item())"
)
"""The note on a run that has noticed losses and neither steps nor what was logged."""

LOSS_WEIGHT = "loss_weight"
"""The metric of what a rank's loss counts for in the mean over the ranks, where that is
not the number of its samples."""

BUFFER = "the buffer "
"""How what is compared between ranks is called where it is a buffer."""

WEIGHTS = "the parameters before a step"
"""How all parameters are called where they are compared before a step that makes them
equal."""

GRADIENTS = "the gradients before a step"
"""How the gradients that a loop has had are called, of which the step takes parts."""

CHECKPOINT = "(checkpoint)"
"""The metric that notes, by its step, that a checkpoint was taken here: what was logged
before is in it, what comes after is not."""

UNWRITTEN = "(unwritten)"
"""The metric 0 of every rank, of which there are no records: where a file of records
has zeros, nothing was written."""

UNREAD = struct.unpack("<d", struct.pack("<Q", 0x7FF8_6C61_626B_6974))[0]
"""The value, a NaN like no other, of a record whose tensor the rank has yet to read."""

MAX_METRICS = 4096
"""Of a rank in a run. All names are sent with every batch; the format has room for
65,535."""
MAX_RANKS = 4096

RESTART_FOLDER = "restart-{}"
"""In a run's folder: the journals of all ranks after the run's first, second, ...
restart."""
BEST_FOLDER = "best"
"""In a run's folder: a checkpoint of the best state so far, of a run that is to end
with it."""
TRAINING_NAMES = ("prepare", "fit", "log", "stop_early")
"""What a training cell has of its run, beside `profile`."""
RECORDS_FILE = "rank-{}.records"
"""In a run's folder: a rank's records, one `RECORD` after the other, then zeros."""
NAMES_FILE = "rank-{}.names"
"""In a run's folder: the names of a rank's metrics, [id, name] in each line."""

PROFILE_FOLDER = "profile"
"""In a run's folder: what ranks recorded of some steps, as TensorBoard reads it."""
TRACE_FILE = "rank-{}.pt.trace.json.gz"
"""In that folder: the trace of a rank."""
PROFILE_NOTE = "--profile: "
BLOCK_NOTE = "profile(): "
"""What each note on that begins with: of `--profile`, or of a block alone."""
STEP_MARK = "ProfilerStep#{}"
"""The range of a trace that a step takes; TensorBoard knows it by this name."""
DATA_MARK = "labkit: next batch"
"""The range in which the loop waits for a batch."""
COMPARISON = "labkit's comparison"
"""The kind of a `Call` that compares with other ranks what the loop does."""
COMPARE_MARK = "labkit: compare {}"
"""The range in which a rank waits for what others are to compare, with their numbers,
as 0,1."""
MODULE_MARK = "nn.Module: "
"""What the range begins with that the forward pass of a module takes: its name and
class follow."""

DUMP_SIGNAL = "SIGURG"
"""Makes a rank write its Python stack to a file; without that it does nothing."""

RECORD = np.dtype(
    [
        ("metric", "<u2"),  # index into the batch's names
        ("step", "<i8"),  # optimizer steps taken in this run
        ("seconds", "<f8"),  # since the cell began on this rank
        # On a GPU what tensors hold; elsewhere what they held at most in the step that
        # was measured last, and 0 before.
        ("memory_bytes", "<i8"),
        ("value", "<f8"),
    ]
)
"""One logged scalar of one rank."""


@dataclass(frozen=True)
class Placement:
    """The place of a rank: what `%dist_start` decided for one engine."""

    rank: int
    local_rank: int
    world_size: int
    device: str
    """A torch device such as "cuda:1" or "cpu"."""
    backend: str
    """The process group's backend: "nccl" or "gloo"."""
    num_threads: int = 1
    """torch's intra-op threads on this rank."""
    group_timeout_s: float = timeouts.GROUP_S
    local_world_size: int = 0
    """Ranks on its host; 0 where all are."""
    host: str = ""
    """As `--hosts` names it; "" for the notebook's own."""
    address: str = "127.0.0.1"
    """At which the other ranks reach it."""
    host_rank: int = 0
    """The number of its host."""
    num_hosts: int = 1

    @property
    def num_local(self) -> int:
        """The number of ranks on its host."""
        return self.local_world_size or self.world_size


@dataclass(frozen=True)
class CheckpointPlan:
    """Where a run keeps its state, and where it takes it from."""

    directory: str
    """An absolute path; the ranks and the notebook find the same in it."""
    every: int = 100
    """Optimizer steps from one checkpoint to the next."""
    keep: int = 3
    """How many are kept, the newest."""
    resume_from: str | None = None
    """The checkpoint that the run resumes from; None for one that starts at step 0."""


@dataclass(frozen=True)
class CellSpec:
    """How ranks are to run one cell; travels in the request's metadata."""

    execution_count: int
    """The notebook's cell number, so that tracebacks on ranks name the same cell."""
    strategy: str | None = None
    """The strategy of `%%dist_train`, or None for a plain `%%dist` cell."""
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """The `TrainOptions` of a training cell, except its config, which is pickled."""
    has_config: bool = False
    """Whether a config was sent before."""
    folder: str | None = None
    """The run's, in which ranks keep their records; None for a run without one."""
    profiles: str | None = None
    """In the run's own folder, also after a restart: where ranks write what they
    record of some steps."""
    checkpoints: dict[str, Any] | None = None
    """The `CheckpointPlan` of a training cell that has one."""
    directory: str | None = None
    """The notebook's working directory; None where it has gone."""
    number: int = 0
    """Of its execution on the ranks: an interrupt that comes late stops no other."""
    can_type: bool = False
    """Whether the user can answer what ranks ask."""


@dataclass(frozen=True)
class ScriptSpec:
    """A script that each rank runs as a process of its own would."""

    file: str
    source: str
    arguments: list[str]
    """All of `sys.argv`."""
    import_folder: str
    """The first of `sys.path`."""
    directory: str | None
    """In which it runs: the notebook's; None where that has gone."""
    module: str = ""
    """Its name, where it runs as `python -m` does."""
    seed: int = 0

    @property
    def command(self) -> str:
        """What torchrun is given to run it."""
        what = ["-m", self.module] if self.module else self.arguments[:1]
        return shlex.join([*what, *self.arguments[1:]])


@dataclass(frozen=True)
class Progress:
    """The progress of a training loop, where its length is known."""

    epoch: int = 0
    epochs: int | None = None
    steps_per_epoch: int | None = None


PROGRESS = {f.name: f"({f.name.replace('_', ' ')})" for f in fields(Progress)}
"""Field of `Progress` -> the metric that notes it."""
NOTES = frozenset({CHECKPOINT, *PROGRESS.values()})
"""Metrics that report progress; they are not part of a run's history."""


@dataclass(frozen=True)
class Batch:
    """Records of one rank since its last batch, in the order of logging."""

    sequence: int
    """The number of the first one among this rank's records of the run, from 0; a gap
    would show a loss."""
    names: list[str]
    records: np.ndarray  # (num_records,) of RECORD


COMPONENTS = (
    "parameters",
    "gradients",
    "optimizer_state",
    "master_parameters",
    "communication_buffers",
    "activations_peak",
    "total_peak",
)
"""What a rank's memory is made of; the first four are the model states."""

PARTS = (*COMPONENTS[:5], "activations", "other")
"""What tensors are that are alive at a moment of a step. Activations are all that the
step makes and is none of the parts before; other tensors are older than the step, as
its batch."""

PHASES = ("forward", "backward", "step")
"""Of a step: the last is that of the optimizer."""


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a training step of one rank."""

    kind: str
    """"all_reduce", "all_gather", "reduce_scatter", ..."""
    count: int = 0
    payload_bytes: int = 0
    """Of the whole tensors."""
    wire_bytes: int = 0
    """What the rank sends, if the collective is a ring."""
    seconds: float | None = 0.0
    """None where they were not waited for."""

    def plus(
        self, payload_bytes: int, wire_bytes: int, seconds: float | None
    ) -> "Collective":
        """With one more of the kind."""
        one = Collective(self.kind, 1, payload_bytes, wire_bytes, seconds)
        return self.and_those_of(one)

    def and_those_of(self, other: "Collective") -> "Collective":
        """With others of the kind."""
        ours, theirs = self.seconds, other.seconds
        return Collective(
            self.kind,
            self.count + other.count,
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
            None if ours is None or theirs is None else ours + theirs,
        )


@dataclass(frozen=True)
class Bucket:
    """Gradients that DDP sends together."""

    names: Sequence[str]
    """Of their parameters, in the order in which they lie in it."""
    sizes: Sequence[int]
    """Bytes of each gradient."""


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of a microbatch through a stage."""

    kind: str
    """"forward" or "backward"."""
    stage: int
    microbatch: int
    began: float
    ended: float
    """In seconds of the host's monotonic clock."""


@dataclass(frozen=True)
class ModelFacts:
    """What the model states of a training step are computed from."""

    num_parameters: int
    """Elements of all parameters that a rank trains a share of, each counted once."""
    num_trainable: int
    state_bytes: float
    """Of the optimizer, for one trainable element: 8 for Adam in fp32."""
    num_shards: int = 1
    """Ranks that share one copy of what the strategy shards."""
    num_regathered: int | None = None
    """Elements that are gathered for the backward pass too, where those are not all."""
    offloaded: Sequence[str] = ()
    """The components that are kept on the host, not on the rank's device."""
    num_parts: int = 1
    """Ranks among which layers are divided, of which the elements above are this
    rank's part."""
    activation_bytes: float = 0.0
    """Of activations and their gradients, that a rank sends in a step to those with
    other parts."""
    matrices: Sequence[Sequence[int]] = field(default_factory=list)
    """Rows and columns of each trainable parameter, where `comm` sends by parameter."""
    comm: Mapping[str, float] = field(default_factory=dict)
    """The settings of what sends the gradients in fewer bytes."""
    buckets: Sequence[Bucket] = field(default_factory=list)
    """In the order in which they are sent, where there are any."""
    passes: Sequence[Pass] = field(default_factory=list)
    """Of the batch before, through this rank's stages, where they are in a schedule."""

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.num_parts < 1:
            raise TypeError("a model has a part on one rank at least")


@dataclass(frozen=True)
class Moments:
    """What tensors on one rank's device hold over the moments of one step."""

    seconds: list[float] = field(default_factory=list)
    """Since the step's first operator."""
    phases: list[int] = field(default_factory=list)
    """The place of each moment's phase in `PHASES`."""
    held: dict[str, list[int]] = field(default_factory=dict)
    """Bytes by part, one for each moment."""

    @property
    def is_whole(self) -> bool:
        """Whether it has as many phases, and bytes of every part, as moments."""
        num_moments = len(self.seconds)
        columns = [self.phases, *self.held.values()]
        return (
            (not num_moments or set(self.held) == set(PARTS))
            and all(len(column) == num_moments for column in columns)
            and all(phase < len(PHASES) for phase in self.phases)
        )


@dataclass(frozen=True)
class Measurement:
    """One training step of one rank, measured."""

    memory: dict[str, int]
    """Bytes by component, each at its greatest within the step."""
    collectives: list[Collective]
    models: list[ModelFacts]
    seconds: float = 0.0
    """Of the whole step, from the end of the one before: also for its data."""
    step: int = 0
    """Which one of the run."""
    moments: Moments = field(default_factory=Moments)
    """Without any where operators were not seen, as those of compiled code."""


@dataclass(frozen=True)
class Averages:
    """What one rank has sent to average its model, where it does so every few steps."""

    num_steps: int = 0
    """Of its own, in the run so far."""
    count: int = 0
    """Of all-reduces."""
    payload_bytes: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: "Averages") -> "Averages":
        """What two models send together."""
        return Averages(
            max(self.num_steps, other.num_steps),
            self.count + other.count,
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Draw:
    """The samples that one rank drew of a dataset in one epoch."""

    epoch: int
    num_samples: int
    """Of the dataset."""
    num_drawn: int
    drawn: int
    """A fingerprint of their indices; those of disjoint sets add up, modulo 2**64."""
    whole: int
    """The fingerprint of all indices."""


@dataclass(frozen=True)
class ReplicaNotes:
    """Samples and parameters of one rank, to be compared across ranks."""

    group: int
    """Ranks of the same group hold replicas of each other."""
    steps: list[int]
    names: list[str]
    values: np.ndarray
    """(num_steps, num_names) fingerprints of the parameters."""
    draws: list[Draw]
    """From the loader that `prepare` returned."""
    own_draws: list[Draw]
    """From the loop's own DataLoaders, while the rank trained, where it took no batch
    from the other."""
    seed: int
    """What this rank's random numbers began with."""
    num_steps: int
    """Of the optimizer, up to here."""
    place: int | None = None
    """Along the axes of data parallelism: ranks of the same one have the same samples.
    None where each rank has its own."""
    loaded: int | None = None
    """What the loop has loaded into models that it trains: of which steps, and when.
    None where it has not ended well."""
    num_copies: int | None = None
    """That it has made of models that are here in parts; None as above."""

    @property
    def taken(self) -> "StepsTaken":
        """Its number of steps alone."""
        return StepsTaken(self.group, self.num_steps, bool(self.names))


@dataclass(frozen=True)
class StepsTaken:
    """How far one rank is in a run, to be compared across ranks."""

    group: int
    """Ranks of the same group hold replicas of each other."""
    num_steps: int
    """Of the optimizer."""
    has_replicas: bool
    """Whether it holds any."""


@dataclass(frozen=True)
class Note:
    """A sentence about the cell's loop, to be shown under the run: where its result may
    differ from that of one process, or where labkit did not do what the cell says."""

    text: str


LINE, SECRET = "line", "secret"
COMMAND, LAST_COMMAND = COMMANDS = "command", "last command"
"""A debugger's: at a breakpoint, or where the cell has failed on that rank."""


@dataclass(frozen=True)
class Question:
    """What a rank asks the user, and waits for: a line that is typed."""

    number: int
    """Of the rank's questions, so that it takes no answer to another."""
    text: str
    """What stands before what is typed."""
    kind: str = LINE
    """`LINE`, `SECRET`, which is not shown, or one of `COMMANDS`."""


@dataclass(frozen=True)
class Frame:
    """One call on a stack."""

    place: str
    """"Cell In[7], line 3" or "train.py:31"."""
    function: str
    source: str = ""
    """The line that runs."""
    is_users: bool = False
    """Whether it is of the notebook or a file of the user's, no library."""


@dataclass(frozen=True)
class Call:
    """A call of torch.distributed that has not come back."""

    kind: str
    """"all_reduce", "recv from rank 1", "new_group", ..."""
    number: int | None = None
    """Which collective of its group it is, counted from 1."""
    num_bytes: int = 0
    group: str = ""
    """The group's name, the same on all of its ranks."""
    ranks: list[int] | None = None
    """The group's; None for the default group."""
    began_ns: int = 0
    """When it did, by `time.time_ns`, where that is known."""

    @property
    def name(self) -> str:
        """As "all_reduce #412 of ranks 0,2"."""
        number = "" if self.number is None else f" #{self.number}"
        of = f" of ranks {','.join(map(str, self.ranks))}" if self.ranks else ""
        return self.kind + number + of


@dataclass(frozen=True)
class Position:
    """Where a rank's main thread is."""

    rank: int
    is_running: bool = True
    """Whether it runs a cell."""
    frames: list[Frame] = field(default_factory=list)
    """From the cell inwards, the innermost last."""
    call: Call | None = None
    """What it waits in."""
    is_busy: bool = False
    """Whether it uses a core; it waits otherwise."""
    started: dict[str, int] = field(default_factory=dict)
    """How many collectives it has started, by the group's name."""
    others: dict[str, list[Frame]] = field(default_factory=dict)
    """Other threads that run code of the user's, by name."""
    is_alone: bool = True
    """Whether the main thread can do nothing but wait for `call`, and no other thread
    may call collectives, as one that saves does: what the main thread has not come to
    that one may."""

    @classmethod
    def from_message(cls, content: dict[str, Any]) -> "Position":
        """From what `dataclasses.asdict` made of one, and JSON of that."""
        call = content["call"]
        return cls(
            **{
                **content,
                "frames": [Frame(**each) for each in content["frames"]],
                "call": None if call is None else Call(**call),
                "others": {
                    name: [Frame(**each) for each in frames]
                    for name, frames in content["others"].items()
                },
            }
        )

    @property
    def users_frame(self) -> Frame | None:
        """The innermost one of the user's."""
        return next((each for each in reversed(self.frames) if each.is_users), None)


SHORT = 160
"""Letters of a message that is one line among others."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended on one rank: the last message about it."""

    rank: int
    status: str
    """"ok", "error", "interrupted", "died", or "restarted": it did not stop."""
    ename: str = ""
    evalue: str = ""
    where: str = ""
    """The line of the cell that was running, such as "line 3: dist.all_reduce(x)"."""
    num_records: int = 0
    """How many it logged and sent."""
    num_not_on_disk: int = 0
    """How many of them were in its memory alone."""
    disk_error: str = ""
    """Why they were."""
    group_in_place: bool = True
    """Whether labkit's own process group is still the default one."""
    freed_bytes: int = 0
    """Of its tensors, which went with the traceback and the cell's garbage."""
    lost_device: str = ""
    """Why its process can use its device, or NCCL, no more, and is to be restarted."""
    num_later_steps: int = 0
    """Optimizer steps in models of former runs, of which all ranks take as many."""
    memory: str = ""
    """Where it ran out of memory: what it held, and what would fit; some lines."""
    traceback: list[str] = field(default_factory=list)

    @property
    def is_to_restart(self) -> bool:
        """Whether its process is, or was, of no further use."""
        return self.status == "restarted" or self.lost_device != ""

    def summary(self, because: str = "") -> str:
        """One line for a rank that is named but not shown in full."""
        lines = self.evalue.strip().splitlines()
        return self._text(shorten(lines[0], SHORT) if lines else "", "; ", because)

    def in_short(self, num_characters: int) -> "Outcome":
        """The same with no longer text than that in each field, and no traceback."""
        texts = {k: v for k, v in vars(self).items() if isinstance(v, str)}
        short: dict[str, Any] = {
            name: shorten(text, num_characters) for name, text in texts.items()
        }
        return replace(self, traceback=[], **short)

    def in_full(self) -> str:
        """As `summary`, with the whole message of an error: a long one on lines of its
        own."""
        message = self.evalue.strip()
        is_long = "\n" in message or len(message) > SHORT
        return self._text(message, "\n" if is_long else "; ")

    def freed(self) -> str:
        """A phrase that says how much was freed; "" below 1 MiB."""
        if self.freed_bytes < 2**20:
            return ""
        return f"{format_bytes(self.freed_bytes)} of its tensors were freed"

    def _text(self, message: str, before_error: str, because: str = "") -> str:
        """Where the rank was, and then why: after a long message the line would seem
        to be a part of it. `before_error` is what parts the two."""
        place = f" at {self.where}" if self.where else ""
        freed = self.freed()
        end = place + because + (f"; {freed}" if freed else "")
        if self.status == "ok":
            return f"rank {self.rank}: finished"
        if self.status == "restarted":
            return f"rank {self.rank}: {self.evalue}"
        if self.status == "interrupted":
            return f"rank {self.rank}: stopped{end}"
        if self.status == "died" and place:
            return f"rank {self.rank}: {self.ename}{end}; {message}"
        error = f"{self.ename}{message and ': '}{message}"
        if place:
            return f"rank {self.rank}: failed{end}{before_error}{error}"
        return f"rank {self.rank}: {error}{end}"


@dataclass(frozen=True)
class CellEnd:
    """How a cell has ended on one rank, which keeps that until a kernel has it."""

    number: int
    """The cell's, of its `CellSpec`."""
    at: float
    """In seconds since the epoch, by the clock of the rank's host."""
    outcome: Outcome
    steps: StepsTaken | None = None
    """None where the cell was no training run."""
    folder: str | None = None
    """The run's, where this rank kept its records in one."""


def shorten(text: str, num_characters: int) -> str:
    """`text`, cut off with an ellipsis where it is longer."""
    if len(text) <= num_characters:
        return text
    return text[: num_characters - 3] + "..."


MIB = 2**20


def format_bytes(num_bytes: float) -> str:
    """Bytes in GiB or MiB, to three digits."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.3g} GiB"
    return f"{num_bytes / 2**20:.3g} MiB"


def significant(value: float) -> str:
    """Three digits that count: "0.123", "12.3", "12,300"."""
    if value < 1000:
        return f"{value:.3g}"
    return f"{float(f'{value:.3g}'):,.0f}"


def memory_unit(num_bytes: float) -> tuple[int, str]:
    """What to divide by, and its name, so that numbers up to this one are read well."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= 2 * unit:
            return unit, name
    return 2**10, "KiB"
