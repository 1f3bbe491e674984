"""Checks of what ranks compute, send and hold."""

from collections.abc import Mapping

from labkit.notebook.runs.run import Run
from labkit.records import format_bytes
from labkit.selftest.bench import Bench
from labkit.selftest.bench import CheckFailedError
from labkit.selftest.bench import Measured

TOLERANCE = 1e-4
"""Relative: what the order of sums in fp32 may change, and no wrong gradient."""
SLOW_LINK: Mapping[str, float] = {"nccl": 0.3, "gloo": 0.02}
"""Of the speed of a plain copy: an all-reduce that is slower is worth a look."""

# SGD: to Adam a gradient that is scaled wrongly looks right.
DATA = """
import torch
from torch.utils.data import TensorDataset
random = torch.Generator().manual_seed(1)
inputs = torch.randn({samples}, 32, generator=random)
targets = torch.randn({samples}, 8, generator=random)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(inputs, targets), batch_size={batch}, shuffle=False
)
"""
LOOP = """
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NUM_STEPS = 6

ALL_REDUCE = """
labkit_wrong = []
for size in (1, 1000, 1_000_003):
    for dtype in (torch.float32, torch.int64):
        values = (torch.arange(size, device=device) % 251).to(dtype)
        total = values + rank
        dist.all_reduce(total)
        right = values * world_size + sum(range(world_size))
        labkit_wrong.append(int((total != right).sum()))
    if dist.get_backend() == "nccl" or not values.is_cuda:  # gloo has none on GPUs
        parts = [torch.empty_like(values) for _ in range(world_size)]
        dist.all_gather(parts, values + rank)
        wrong = [int((part != values + i).sum()) for i, part in enumerate(parts)]
        labkit_wrong.append(sum(wrong))
    first = values + rank
    dist.broadcast(first, src=0)
    labkit_wrong.append(int((first != values).sum()))
"""

BANDWIDTH = """
import time
is_cuda = torch.device(device).type == "cuda"
tensor = torch.ones(2**26 if is_cuda else 2**22, device=device)
# To another GPU, where there is one: what the link between two of them gives.
other = device
if is_cuda and torch.cuda.device_count() > 1:
    other = torch.device("cuda", (torch.device(device).index + 1)
                         % torch.cuda.device_count())
copy = torch.empty_like(tensor, device=other)

def finish():
    if is_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.synchronize(other)

def seconds_of(work, times=5):
    for _ in range(2):
        work()
    finish()
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        work()
        finish()
        best = min(best, time.perf_counter() - began)
    return best

labkit_seconds = seconds_of(lambda: dist.all_reduce(tensor))
labkit_copy_seconds = 0.0
if rank == 0:
    labkit_copy_seconds = seconds_of(lambda: copy.copy_(tensor))
dist.barrier()
labkit_bytes = tensor.nbytes
del tensor, copy
"""


def all_reduce(bench: Bench) -> Measured:
    """All-reduces, all-gathers and broadcasts of three sizes have the right values."""
    bench.lab.run(ALL_REDUCE, timeout=60)
    for rank, wrong in enumerate(bench.pull("labkit_wrong")):
        if any(wrong):
            raise CheckFailedError(
                f"rank {rank} got {sum(wrong):,} wrong elements in "
                f"{sum(map(bool, wrong))} of {len(wrong)} collectives"
            )
    return Measured("right, also with 1,000,003 elements")


def bandwidth(bench: Bench) -> Measured:
    """How fast an all-reduce is, beside a plain copy."""
    lab = bench.lab
    lab.run(BANDWIDTH, timeout=90)
    num_bytes = lab.pull("labkit_bytes")
    wire_bytes = 2 * (lab.world_size - 1) / lab.world_size * num_bytes
    rate = wire_bytes / max(bench.pull("labkit_seconds"))
    link = num_bytes / lab.pull("labkit_copy_seconds")
    gpus = len(bench.machine.gpus) if lab.device == "cuda" else 0
    return judge_bandwidth(rate, link, num_bytes, lab.backend, gpus)


def judge_bandwidth(
    rate: float, link: float, num_bytes: float, backend: str, num_gpus: int
) -> Measured:
    """An all-reduce of `num_bytes` with a bus bandwidth of `rate`, where a copy has
    `link`, both in bytes/s."""
    copied = "from GPU to GPU" if num_gpus > 1 else "in memory"
    text = (
        f"{rate / 1e9:.3g} GB/s on each rank's bus, for {format_bytes(num_bytes)}; "
        f"a copy {copied} {link / 1e9:.3g} GB/s"
    )
    if rate >= SLOW_LINK[backend] * link:
        return Measured(text)
    what = "is the machine busy, or has it fewer cores than ranks?"
    if backend == "nccl":
        what = "NCCL_DEBUG=INFO says which links it uses"
    elif num_gpus:
        what = "gloo goes through the host's memory, and nccl needs a GPU for each rank"
    return Measured(text, f"that is {100 * rate / link:.2g}% of the copy; {what}")


def train(bench: Bench, strategy: str, code: str) -> list[float]:
    """The losses of a run of `code`, with a batch for every number of ranks."""
    batch = 8 * bench.lab.world_size
    code = code.replace("{batch}", f"{batch}")
    code = code.replace("{samples}", f"{NUM_STEPS * batch}")
    run = bench.lab.train(strategy, code, live=False, hang_after=0)
    return losses_of(run)


def losses_of(run: Run) -> list[float]:
    """One for each step."""
    return [float(loss) for loss in run.mean_loss()["loss"]]


def reference(bench: Bench) -> list[float]:
    """The losses of one process on the same batches."""
    if not bench.reference:
        bench.reference = train(bench, "single", DATA + LOOP)
        if len(bench.reference) != NUM_STEPS:
            raise CheckFailedError(
                f"one process alone gave {len(bench.reference)} losses of {NUM_STEPS}"
            )
    return bench.reference


def compare(found: list[float], right: list[float], what: str) -> float:
    """The largest relative difference; CheckFailedError where it is one."""
    if len(found) != len(right):
        raise CheckFailedError(f"{what}: {len(found)} losses, and not {len(right)}")
    worst = 0.0
    for step, (one, other) in enumerate(zip(found, right, strict=True), start=1):
        difference = abs(one - other) / abs(other)
        if not difference <= TOLERANCE:  # which a NaN is not either
            raise CheckFailedError(
                f"{what}: the loss of step {step} is {one:.6g}; one process has "
                f"{other:.6g}"
            )
        worst = max(worst, difference)
    return worst


def closeness(worst: float) -> str:
    """How close losses are whose greatest difference is this."""
    return f"to within {worst:.0e}" if worst else "to the last digit"


def strategy(name: str, bench: Bench) -> Measured:
    """The losses of a strategy are those of one process."""
    right = reference(bench)
    worst = compare(train(bench, name, DATA + LOOP), right, name)
    return Measured(f"the same losses in {NUM_STEPS} steps, {closeness(worst)}")


def shared_gpu(bench: Bench) -> Measured:
    """Several ranks on one GPU, over gloo."""
    num_ranks = len(bench.machine.gpus) + 1
    other = Bench(bench.folder, bench.machine)
    right, wrong = [], []
    with bench.start(num_ranks=num_ranks, backend="gloo", device="cuda") as lab:
        other.use(lab)
        for name in ("ddp", "zero1", "fsdp"):
            try:
                strategy(name, other)
                right.append(name)
            except (CheckFailedError, RuntimeError) as error:
                wrong.append(f"{name}: {error}")
    if wrong:
        raise CheckFailedError("\n".join(wrong))
    return Measured(f"{', '.join(right)} right on {num_ranks} ranks over gloo")


def checkpoint(bench: Bench) -> Measured:
    """What one strategy has saved, another trains on from."""
    right = reference(bench)
    half = NUM_STEPS // 2
    folder = str(bench.folder / "checkpoint")
    until = f"    if step == {half}:\n        break\n"
    loop = LOOP.replace("for x, y in loader", "for step, (x, y) in enumerate(loader)")
    before = loop.replace("    loss =", f"{until}    loss =", 1)
    after = loop.replace(
        "    loss =", f"    if step < {half}:\n        continue\n    loss =", 1
    )
    saved = train(
        bench, "fsdp", DATA + before + f"save_checkpoint({folder!r}, half=step)"
    )
    compare(saved, right[:half], "fsdp")
    found = train(bench, "zero1", DATA + f"load_checkpoint({folder!r})\n" + after)
    worst = compare(found, right[half:], "zero1, from a checkpoint of fsdp")
    return Measured(f"saved under fsdp, trained on under zero1, {closeness(worst)}")


MEMORY = """
import torch
from torch.utils.data import TensorDataset
is_cuda = torch.device(device).type == "cuda"
labkit_before = torch.cuda.memory_allocated() if is_cuda else 0
model = torch.nn.Sequential(*(torch.nn.Linear({width}, {width}) for _ in range(2)))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(4 * world_size, {width}))
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=world_size, shuffle=False
)
for (x,) in loader:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
del x, loss
if is_cuda:
    labkit_held = torch.cuda.memory_allocated() - labkit_before
else:
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
    labkit_held = sum(t.nbytes for t in tensors)
"""


def memory(bench: Bench) -> Measured:
    """What labkit measures is what the allocator has given, or what tensors hold."""
    lab = bench.lab
    code = MEMORY.replace("{width}", "4096" if lab.device == "cuda" else "256")
    run = lab.train("ddp", code, live=False, hang_after=0)
    names = ["parameters", "gradients", "optimizer_state"]
    whose, slack = "tensors hold", 0.0
    if lab.device == "cuda":
        # The reducer's buckets are tensors too, and to the allocator no others.
        names.append("communication_buffers")
        whose = "the allocator gave"
    sums = run.memory[names].sum(axis=1).to_dict()
    for rank, held in enumerate(bench.pull("labkit_held")):
        measured = float(sums.get(rank, 0.0))
        if lab.device == "cuda":
            slack = 0.02 * held + 2**26  # it rounds up, and cuBLAS has a workspace
        if abs(measured - held) > slack:
            raise CheckFailedError(
                f"rank {rank}: labkit measured {format_bytes(measured)}, and {whose} "
                f"{format_bytes(held)}"
            )
    return Measured(f"{format_bytes(measured)} a rank under ddp; {whose} as much")


COUNT_GROUPS = (
    "from labkit.compat.c10d import names_of_groups\n"
    "labkit_groups = len(names_of_groups())"
)


def groups(bench: Bench) -> Measured:
    """Runs leave no process groups behind."""
    counts = []
    for _ in range(3):
        for name in ("zero1", "hsdp"):
            train(bench, name, DATA + LOOP)
        bench.lab.run(COUNT_GROUPS)
        counts.append(max(bench.pull("labkit_groups")))
    # The first run may make groups that all later ones use.
    if counts[-1] > counts[0]:
        return Measured(
            f"process groups after 2, 4 and 6 runs: {', '.join(map(str, counts))}",
            "each holds threads and sockets, or memory of the GPU; %dist_restart --all "
            "frees them",
        )
    return Measured(f"{counts[0]} process groups, as many after 2 runs as after 6")
