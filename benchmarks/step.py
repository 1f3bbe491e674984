"""What a training step costs under each strategy: here against another checkout.

`benchmarks/step.py ../before` runs the same loop in a lab of this checkout and in one
of that folder's, in turns, strategy by strategy: an MLP (64-128-10) on the digits,
global batch 64, two CPU ranks with one thread each, so that a step is a millisecond or
a few and whatever labkit adds can be seen. The other checkout needs no environment of
its own. Each figure is the median of the rounds; the ratio is of each round's pair.
"""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import IO

from _measure import parser
from _measure import print_table

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
CELL = """
import time
import torch.nn.functional as F
from torch import nn
from labkit.data import digits

num_steps, first_timed = {steps}, 50
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=64)
step = 0
while step < num_steps:
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == first_timed:
            began = time.perf_counter()
        if step == num_steps:
            break
milliseconds = 1e3 * (time.perf_counter() - began) / (num_steps - first_timed)
"""
SERVE = """
import sys
from labkit import Lab
with Lab(num_ranks=2, device="cpu") as lab:
    print("ready", flush=True)
    for line in sys.stdin:
        strategy, steps = line.split()
        lab.train(strategy, {cell!r}.replace("{{steps}}", steps), live=False)
        print("took", lab.pull("milliseconds"), flush=True)
"""


class Served:
    """A lab of one checkout, in a process of its own."""

    def __init__(self, checkout: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE.format(cell=CELL)],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer("ready")

    def milliseconds(self, strategy: str, steps: int) -> float:
        stdin: IO[str] = self.process.stdin  # type: ignore[assignment]
        print(strategy, steps, file=stdin, flush=True)
        return float(self._answer("took"))

    def _answer(self, word: str) -> str:
        stdout: IO[str] = self.process.stdout  # type: ignore[assignment]
        for line in stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"the lab ended: {self.process.wait()}")

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(timeout=60)


def main() -> None:
    made = parser(__doc__, steps=550, rounds=7)
    made.add_argument("before", type=Path, help="the folder of the other checkout")
    args = made.parse_args()
    here, before = Served(Path(__file__).parents[1]), Served(args.before)
    rows = []
    for strategy in STRATEGIES:
        here.milliseconds(strategy, 60), before.milliseconds(strategy, 60)
        pairs = [
            (
                here.milliseconds(strategy, args.steps),
                before.milliseconds(strategy, args.steps),
            )
            for _ in range(args.rounds)
        ]
        ours, others = (median(each) for each in zip(*pairs, strict=True))
        ratios = sorted(one / other for one, other in pairs)
        rows.append(
            [
                strategy,
                f"{others:.2f}",
                f"{ours:.2f}",
                f"{median(ratios):.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            ]
        )
    here.close(), before.close()
    header = ["strategy", "before, ms", "here, ms", "ratio", "of single rounds"]
    print_table("a step of two ranks", header, rows)


if __name__ == "__main__":
    main()
