"""What labkit itself takes of a training step: CPU time of the rank's main thread.

The same loop with labkit and without, in turns, on the same two CPU ranks: an MLP
(64-128-10) on the digits, global batch 64, one torch thread each. Without it a plain
`%%dist` cell does by hand what the strategy does: indexes the tensors, wraps the model
in DistributedDataParallel or `fully_shard`, or has DeepSpeed's engine with labkit's own
configuration. No picture is drawn.

The clock is the thread's own, so what others do on the machine matters little. A step
is the first quartile of a run's steps, then the median of the rounds. `of it, by part`
says where the difference is: the batch, forward, backward, `step`, `zero_grad`. `mean`
includes occasional work, too: reading the loss, fingerprints of the replicas; not the
steps in which labkit profiles memory.

`calls` is how many functions written in Python labkit calls in a step, counted over
100 steps: the same on every machine, and so what shows whether a version does more.
"""

from collections.abc import Sequence

import numpy as np
from _measure import parser
from _measure import print_table

from labkit import Lab

TARGET_US = 20
PARTS = ("batch", "forward", "backward", "step", "zero_grad")

SETUP = """
import time
import numpy as np
import torch.nn.functional as F
from torch import nn
from labkit.data import digits

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""

BY_HAND = """
samples, labels = digits().tensors

class Batches:
    def __iter__(self):
        size = 64 // num_ranks
        order = torch.randperm(len(labels))[rank % num_ranks :: num_ranks]
        for first in range(0, len(order), size):
            at = order[first : first + size]
            yield samples[at], labels[at]

loader = Batches()
"""

DDP = """
model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
"""

DEEPSPEED = """
from labkit.strategies.zero.config import deepspeed_config
from labkit.strategies.zero.engines import import_deepspeed
from labkit.strategies.zero.engines import quiet
from labkit.train_options import TrainOptions

num_parameters = sum(p.numel() for p in model.parameters())
config = deepspeed_config(TrainOptions(), {stage}, num_parameters, "cpu")
with quiet():
    model, *_ = import_deepspeed(device).initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
model.zero_grad = lambda: None  # its step does so
optimizer = model
"""

FSDP = """
import warnings
from torch.distributed.fsdp import fully_shard
warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated")
for layer in (model[1], model[3]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""

PREPARED = """
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=64)
"""

LOOP = """
import os
import sys
import labkit
folder, calls = os.path.dirname(labkit.__file__), 0
def count(frame, event, argument):
    global calls
    calls += event == "call" and frame.f_code.co_filename.startswith(folder)
def count_in_some(steps):
    if steps in ({first_counted}, {first_counted} + 100):
        sys.setprofile(count if steps == {first_counted} else None)
clock, took = time.thread_time_ns, []
while len(took) < {steps}:
    batches = iter(loader)
    while True:
        t0 = clock()
        batch = next(batches, None)
        if batch is None:
            break
        x, y = batch
        t1 = clock()
        loss = F.cross_entropy(model(x), y)
        t2 = clock()
        {backward}
        t3 = clock()
        optimizer.step()
        t4 = clock()
        optimizer.zero_grad()
        took.append((t0, t1, t2, t3, t4, clock()))
        count_in_some(len(took))
took = np.diff(took) / 1e3
"""

# Strategy -> what a plain cell does in its place, and ranks that train one model.
PLAIN = {
    "raw": (DDP, 2),
    "single": ("", 1),
    "ddp": (DDP, 2),
    "zero1": (DEEPSPEED.format(stage=1), 2),
    "zero2": (DEEPSPEED.format(stage=2), 2),
    "zero3": (DEEPSPEED.format(stage=3), 2),
    "fsdp": (FSDP, 2),
}
FIRST_COUNTED = 150
FIRST_TIMED = 310
"""labkit profiles memory at steps 300 and 1,000: timed are those between them."""


def main() -> None:
    made = parser(__doc__, rounds=5, steps=900)
    made.add_argument("strategies", nargs="*", default=list(PLAIN))
    args = made.parse_args()
    rows = []
    with Lab(num_ranks=2, device="cpu", threads=1) as lab:
        for strategy in args.strategies:
            plain, ours = [], []
            for _ in range(args.rounds):
                lab.run(cell(strategy, args.steps, is_plain=True))
                plain.append(times(lab))
                code = cell(strategy, args.steps, is_plain=strategy == "raw")
                lab.train(strategy, code, live=False)
                ours.append(times(lab))
                calls = lab.pull("calls", ranks=0) / 100
            rows.append([strategy, *row(plain, ours), f"{calls:.0f}"])
    print_table(
        f"CPU time of a step, us: {args.rounds} rounds, from step {FIRST_TIMED} on",
        ["strategy", "plain", "labkit", "own", *PARTS, "mean", "target", "calls"],
        rows,
    )


def cell(strategy: str, steps: int, *, is_plain: bool) -> str:
    """A run of so many steps, by hand or after `prepare`."""
    setup, num_ranks = PLAIN[strategy]
    backward = "loss.backward()"
    if is_plain:
        setup = f"{setup}\nnum_ranks = {num_ranks}\n{BY_HAND}"
        if "initialize" in setup:
            backward = "model.backward(loss)"
    else:
        setup = PREPARED
    return (
        SETUP
        + setup
        + LOOP.format(steps=steps, backward=backward, first_counted=FIRST_COUNTED)
    )


def times(lab: Lab) -> np.ndarray:
    """Of rank 0's last run, in microseconds: (steps, parts)."""
    found: np.ndarray = lab.pull("took", ranks=0)
    return found[FIRST_TIMED:990]


def row(plain: Sequence[np.ndarray], ours: Sequence[np.ndarray]) -> list[str]:
    """A step of both, the difference, where it is, and that of the means."""

    def quartile(runs: Sequence[np.ndarray]) -> float:
        return float(np.median([np.quantile(run.sum(1), 0.25) for run in runs]))

    def by_part(runs: Sequence[np.ndarray]) -> np.ndarray:
        return np.median([np.quantile(run, 0.25, axis=0) for run in runs], axis=0)

    def mean(runs: Sequence[np.ndarray]) -> float:
        return float(np.median([run.sum(1).mean() for run in runs]))

    figures = [
        *(quartile(plain), quartile(ours), quartile(ours) - quartile(plain)),
        *(by_part(ours) - by_part(plain)),
        mean(ours) - mean(plain),
    ]
    return [*(f"{figure:.0f}" for figure in figures), f"<= {TARGET_US}"]


if __name__ == "__main__":
    main()
