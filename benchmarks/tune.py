"""A study of 30 trials on warm ranks against 30 starts of torchrun, the same trainings.

An MLP on the digits, ddp on two CPU ranks over gloo, one torch thread each. A study
without a pruner, so that each trial is run to its end; one with Hyperband, which stops
what falls behind; then torchrun with the parameters of each trial of the first. Seconds
are those of a clock, from the call to its return; the lab's start, once, is in neither.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import parser
from _measure import print_table

from labkit import Lab
from labkit.rank.group.settings import loopback_interface

TRAIN = """
import torch.nn.functional as F
from torch import nn
from labkit.data import digits

torch.manual_seed(0)
layers = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)
model = nn.Sequential(nn.Flatten(), *layers)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
"""
LOOP = """
for epoch in range({epochs}):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
CELL = """
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=64)
"""
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

lr, width = float(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
"""
BY_THE_BATCH = """
model = DistributedDataParallel(model, gradient_as_bucket_view=True)
sampler = DistributedSampler(digits(), seed=0)
batches = BatchSampler(sampler, 64 // dist.get_world_size(), drop_last=False)
loader = DataLoader(digits(), batch_size=None, sampler=batches)
"""
SPACE = {"lr": (1e-3, 3.0, "log"), "width": [16, 32, 64]}


def study(lab: Lab, epochs: int, trials: int, pruner: str) -> tuple[float, Any]:
    code = TRAIN + CELL + LOOP.format(epochs=epochs)
    began = time.perf_counter()
    found = lab.tune(
        code, SPACE, trials=trials, pruner=pruner, metric="loss", live=False
    )
    return time.perf_counter() - began, found


def torchrun(script: Path, lr: float, width: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(script), repr(lr), str(width)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback_interface(),
    }
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - began


def main() -> None:
    args = parser(__doc__, trials=30, epochs=10).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LABKIT_RUNS"] = folder
        script = Path(folder, "train.py")
        loop = LOOP.format(epochs=args.epochs)
        script.write_text(
            SCRIPT + TRAIN + BY_THE_BATCH + loop + "dist.destroy_process_group()\n"
        )
        with Lab(num_ranks=2) as lab:
            whole_s, whole = study(lab, args.epochs, args.trials, "none")
            pruned_s, pruned = study(lab, args.epochs, args.trials, "hyperband")
        torchrun_s = sum(
            torchrun(script, lr, width)
            for lr, width in zip(whole.table["lr"], whole.table["width"], strict=True)
        )
        in_runs_s = whole.table["seconds"].sum()
        num_pruned = int((pruned.table["state"] == "pruned").sum())
    rows = [
        ["torchrun, a start each", f"{torchrun_s:.1f}", "1.00", ""],
        [
            "a study, no pruner",
            f"{whole_s:.1f}",
            f"{torchrun_s / whole_s:.2f}",
            f"{in_runs_s:.1f} s in runs; best {whole.best_value:.3f}",
        ],
        [
            "a study, hyperband",
            f"{pruned_s:.1f}",
            f"{torchrun_s / pruned_s:.2f}",
            f"{num_pruned} pruned; best {pruned.best_value:.3f}",
        ],
    ]
    print_table(
        f"{args.trials} trials of {args.epochs} epochs, {args.epochs * 23} steps each",
        ["", "seconds", "times as fast", ""],
        rows,
    )


if __name__ == "__main__":
    main()
