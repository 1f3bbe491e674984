"""Steps per second of a small DDP loop: `%%dist_train` against torchrun.

An MLP (64-128-10) on the digits, global batch 64, two CPU ranks over gloo, one torch
thread each: a step of about a millisecond, so that whatever labkit adds can be seen.
`--hidden` makes it longer; `--ranks`, fewer than the cores, leaves some of those to the
kernel and its helpers.
In a real kernel, where the live picture is drawn and published. Every way takes its
turn in every round; steps are timed by the loop itself, from step 50 to the last.

Two comparisons. `textbook`: the same text on both sides, DataLoader with
DistributedSampler, sample by sample. `prepared`: the cell uses `prepare`, whose loader
indexes the tensors once a batch; torchrun's side is written to do so too.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from _kernel import Kernel
from _kernel import lab_kernel
from _measure import parser
from _measure import print_table

from labkit.rank.group.settings import loopback_interface

TARGET = 0.97

MODEL = """
import time
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from labkit.data import digits

num_steps, first_timed = {steps}, 50
torch.manual_seed(0)
layers = nn.Linear(64, {hidden}), nn.ReLU(), nn.Linear({hidden}, 10)
model = nn.Sequential(nn.Flatten(), *layers)
"""

TEXTBOOK = """
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sampler = DistributedSampler(digits())
loader = DataLoader(digits(), batch_size=64 // world_size, sampler=sampler)
"""

BY_THE_BATCH = """
model = DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sampler = DistributedSampler(digits())
batches = BatchSampler(sampler, 64 // world_size, drop_last=False)
loader = DataLoader(digits(), batch_size=None, sampler=batches)
"""

PREPARED = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=64)
"""

LOOP = """
step = 0
while step < num_steps:
    if isinstance(loader, DataLoader):
        sampler.set_epoch(step)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == first_timed:
            began = time.perf_counter()
        if step == num_steps:
            break
rate = (num_steps - first_timed) / (time.perf_counter() - began)
"""

AS_A_SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
"""

LAST_WORDS = """
if rank == 0:
    print("steps per second:", rate)
dist.destroy_process_group()
"""

# Name -> how the cell begins ("" for torchrun) and how it sets up the loop.
WAYS = {
    "textbook, torchrun": ("", TEXTBOOK),
    "textbook, %%dist (nothing watched)": ("%%dist", TEXTBOOK),
    "textbook, %%dist_train raw --no-live": ("%%dist_train raw --no-live", TEXTBOOK),
    "textbook, %%dist_train raw": ("%%dist_train raw", TEXTBOOK),
    "prepared, torchrun": ("", BY_THE_BATCH),
    "prepared, %%dist_train ddp --no-live": ("%%dist_train ddp --no-live", PREPARED),
    "prepared, %%dist_train ddp": ("%%dist_train ddp", PREPARED),
}


def main() -> None:
    args = parser(__doc__, rounds=5, steps=4000, ranks=2, hidden=128).parse_args()
    rates, pictures = defaultdict(list), defaultdict(list)
    start = f"%dist_start -n {args.ranks} --device cpu --threads 1"
    with lab_kernel(start) as kernel:
        for number in range(args.rounds):
            # There and back again, so that a slow drift of the machine cancels out.
            turns = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
            for way in turns:
                magic, setup = WAYS[way]
                size = MODEL.format(steps=args.steps, hidden=args.hidden)
                code = size + setup + LOOP
                if magic:
                    measured = in_cell(kernel, magic, code)
                else:
                    measured = by_torchrun(code, args.ranks)
                rates[way].append(measured[0])
                pictures[way].append(measured[1])
    print_table(
        f"Steps per second, median of {args.rounds} rounds of {args.steps} steps",
        ["loop", "steps/s", "of torchrun", "least", "most", "pictures", "target"],
        [row(way, rates, round(median(pictures[way]))) for way in WAYS],
    )
    print("of torchrun: the median of the ratios of each round; least and most of them")


def row(way: str, rates: dict[str, list[float]], num_pictures: int) -> list[str]:
    """A way's figures, against torchrun on the same loop in the same round."""
    baseline = way.split(",")[0] + ", torchrun"
    pairs = zip(rates[way], rates[baseline], strict=True)
    ratios = [rate / reference for rate, reference in pairs]
    figures = [f"{f(ratios):.3f}" for f in (median, min, max)]
    return [
        way,
        f"{median(rates[way]):.0f}",
        *([""] * 3 if way == baseline else figures),
        str(num_pictures),
        f">= {TARGET}" if num_pictures else "",
    ]


def in_cell(kernel: Kernel, magic: str, code: str) -> tuple[float, int]:
    """Steps per second of the loop in a cell, and how often it was drawn."""
    shown = kernel.run(f"{magic}\n{code}")
    kernel.run("%dist_pull rate")
    return kernel.value("rate"), shown.num_pictures


def by_torchrun(code: str, num_ranks: int) -> tuple[float, int]:
    """Steps per second of the loop as a script under torchrun; nothing is drawn."""
    options = ["--standalone", "--nproc-per-node", str(num_ranks)]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback_interface()}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "loop.py")
        script.write_text(AS_A_SCRIPT + code + LAST_WORDS)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options, script],
            env=os.environ | settings,
            capture_output=True,
            text=True,
        )
    found = re.search(r"steps per second: ([\d.]+)", done.stdout)
    if found is None:
        raise RuntimeError(f"torchrun failed:\n{done.stderr}")
    return float(found[1]), 0


if __name__ == "__main__":
    main()
