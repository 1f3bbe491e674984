"""What ranks run, the same under every peer.

Ranks say what they find in files, as not every peer can bring a value back. Code finds
`rank` and `world_size` where it runs.
"""

import ast
from pathlib import Path
from typing import Any

KEEP = "kept = rank"
"""What a failure may cost."""

NOTE = """
import os, time
def note(name, value=None):
    path = os.path.join({folder!r}, name + "-" + str(rank))
    with open(path + ".part", "w") as file:
        file.write(repr(time.time() if value is None else value))
    os.replace(path + ".part", path)
"""
JOIN = """
import torch
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group({backend!r}, {how})
rank, world_size = dist.get_rank(), dist.get_world_size()
"""
CHECK = """
import torch
import torch.distributed as dist
ones = torch.ones(1)
dist.all_reduce(ones)
if ones.item() == world_size:
    note("sum-is-right", globals().get("kept") == rank)
"""
TRAINING = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
size = 64 * 20 * world_size
data = TensorDataset(torch.randn(size, 256), torch.randint(10, (size,)))
layers = [nn.Linear(256, {width}), nn.ReLU(), nn.Linear({width}, {width}), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear({width}, 10))
optimizer = torch.optim.SGD(model.parameters(), lr={lr})
{wrapped}
step = 0
while step < {steps}:
    for x, y in loader:
        if step == {first_timed}:
            began = time.perf_counter()
        loss = F.cross_entropy(model(x), y)
        {backward}
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            note("first-step")
        step += 1
        if step == {steps}:
            break
note("rate-{width}", ({steps} - {first_timed}) / (time.perf_counter() - began))
"""
BY_THE_BATCH = """
batches = BatchSampler(DistributedSampler(data), 64, drop_last=False)
loader = DataLoader(data, batch_size=None, sampler=batches)
"""
PREPARED = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=64 * world_size)
"""
DDP = """
model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
"""
FSDP = """
from torch.distributed.fsdp import fully_shard
for layer in model[::2]:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr={lr})
"""
ZERO2 = """
import deepspeed
# Or it compiles an op for inference, for a minute or more.
ops = deepspeed.ops.__compatible_ops__
deepspeed.ops.__compatible_ops__ = dict.fromkeys(ops, False)
config = {{
    "train_micro_batch_size_per_gpu": 64,
    "zero_optimization": {{"stage": 2}},
    "zero_allow_untested_optimizer": True,
}}
model, *_ = deepspeed.initialize(
    model=model, optimizer=optimizer, config=config, dist_init_required=False
)
model.zero_grad = lambda: None  # its step does so
optimizer = model
"""
BY_HAND = {"": DDP, "ddp": DDP, "fsdp": FSDP, "zero2": ZERO2}
"""Strategy -> what a script says for it; "" is the cell that every peer can run."""
SIZES = {2: 192, 10: 960}
"""About so many milliseconds a step on two cores: the width of the layers."""
SHOW_AND_WAIT = """
note("pid", os.getpid())
until = time.monotonic() + {limit_s}
while not os.path.exists({go!r}) and time.monotonic() < until:
    time.sleep(0.01)
"""
IN_ALL_REDUCE = """
import torch
import torch.distributed as dist
if rank == world_size - 1:
    time.sleep({settle_s})
    note("cause")
    {cause}
dist.all_reduce(torch.ones(1))
"""
CAUSES = {
    "raise": 'raise ValueError("on purpose")',
    "kill": "os.kill(os.getpid(), 9)",
}
SETTLE_S = 0.5
"""The other ranks are in the collective by then."""
STUCK = """
import torch
import torch.distributed as dist
note("inside")
if rank == 0:
    dist.all_reduce(torch.ones(1))
else:
    dist.barrier()
"""
MEASURED = 1, 3, 10, 30, 100, 300
"""Steps of a run whose memory and collectives labkit measures, which take longer: few
of a run that lasts. Timed are those that follow the last of them."""
SETTLED = 5
"""So many steps after it."""


def join(how: str = "", backend: str = "gloo") -> str:
    """A process group, of what the environment says or of `how`."""
    return JOIN.format(how=how, backend=backend)


def check(folder: Path) -> str:
    """An all-reduce, and whether `kept` is still there."""
    return NOTE.format(folder=str(folder)) + CHECK


def training(
    folder: Path,
    width: int,
    steps: int,
    *,
    lr: float = 0.01,
    strategy: str = "",
    is_prepared: bool = False,
) -> str:
    """A loop that notes its first step, and its rate by `width`: by hand, or after
    `prepare`."""
    by_hand = BY_HAND[strategy].format(lr=lr) + BY_THE_BATCH
    is_engine = strategy == "zero2" and not is_prepared
    text = TRAINING.format(
        width=width,
        steps=steps,
        lr=lr,
        wrapped=PREPARED if is_prepared else by_hand,
        backward="model.backward(loss)" if is_engine else "loss.backward()",
        first_timed=first_timed(steps),
    )
    return NOTE.format(folder=str(folder)) + text


def first_timed(num_steps: int) -> int:
    """From which step on a run of so many is timed."""
    last = max(each for each in MEASURED if each < num_steps)
    return min(last + SETTLED, num_steps - 1)


def show_and_wait(folder: Path, go: Path, limit_s: float) -> str:
    """Each rank's process id; it stays until there is a file."""
    text = SHOW_AND_WAIT.format(go=str(go), limit_s=limit_s)
    return NOTE.format(folder=str(folder)) + text


def failure(folder: Path, kind: str) -> str:
    """The last rank comes to grief while the others are in an all-reduce."""
    text = IN_ALL_REDUCE.format(cause=CAUSES[kind], settle_s=SETTLE_S)
    return NOTE.format(folder=str(folder)) + text


def stuck(folder: Path) -> str:
    """Collectives that do not match: every rank waits in one."""
    return NOTE.format(folder=str(folder)) + STUCK


def data(megabytes: int) -> str:
    """An array of float32."""
    size = megabytes * 10**6 // 4
    return f"import numpy as np\ndata = np.ones({size}, dtype=np.float32)"


def read_note(path: Path) -> Any:
    return ast.literal_eval(path.read_text())
