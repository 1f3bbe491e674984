"""Judges the exercises on what goes wrong in a run, and in a run that moves."""

import csv
import math
import time
from collections.abc import Callable
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from labkit.course.exercise import Verdict

HOUR = 3600.0
# Seconds of a checkpoint, and hours from one failure to the next.
CASES = ((1.0, HOUR), (30.0, 3 * HOUR), (300.0, 24 * HOUR))
RESTART_S = 120.0
SABOTAGED = {"first": (1, "compute"), "second": (0, "asleep"), "third": (0, "data")}
"""Of each run of an exercise, which rank is slow, and by what."""
CAUSES = ("data", "compute", "asleep")


def best_every(answer: Callable[[float, float], float]) -> Verdict:
    """`answer(checkpoint_s, between_failures_s)` gives the seconds from one checkpoint
    to the next; judged by the time that is lost with them, against the least."""
    worst = 1.0
    for checkpoint_s, between_failures_s in CASES:
        every_s = float(answer(checkpoint_s, between_failures_s))
        if not 0 < every_s < math.inf:
            return Verdict(complaint=f"{every_s:g} s is no time between checkpoints")
        shares = [1.01**power for power in range(-700, 700)]
        middle = math.sqrt(checkpoint_s * between_failures_s)
        least = min(
            lost_share(share * middle, checkpoint_s, between_failures_s)
            for share in shares
        )
        lost = lost_share(every_s, checkpoint_s, between_failures_s)
        worst = max(worst, lost / least)
    return Verdict(
        measured=f"at worst it loses {worst:.2f} times what the best interval loses",
        to_beat="1.02 times or less",
        is_beaten=worst <= 1.02,
    )


def lost_share(every_s: float, checkpoint_s: float, between_failures_s: float) -> float:
    """The seconds that checkpoints, failures and what is done again take, for each
    second of training.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", 2006, equation 20: failures come at random, at a constant rate.
    """
    mean = between_failures_s
    try:
        grown = math.expm1((every_s + checkpoint_s) / mean)
    except OverflowError:
        return math.inf
    return mean * math.exp(RESTART_S / mean) * grown / every_s - 1.0


def train_sabotaged(name: str, prepare: Any, rank: int) -> None:
    """Train in a training cell, with one rank that something makes slow. `prepare` and
    `rank` are the cell's."""
    import torch
    import torch.nn.functional as F

    from labkit.data import digits
    from labkit.models import mlp

    slow, cause = SABOTAGED[name]
    cause = cause if slow == rank else ""
    images, labels = digits().tensors
    work = torch.randn(700, 700)

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 20 * 64

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.001 if cause == "data" else 0.0)
            return images[index], labels[index]

    model = mlp(num_hidden=512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(model, optimizer, Samples(), batch_size=64)
    for x, y in loader:
        if cause == "compute":
            for _ in range(4):
                work.mm(work)
        if cause == "asleep":
            time.sleep(0.03)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def name_rank_and_cause(answer: Mapping[str, tuple[int, str]]) -> Verdict:
    """`answer` has the slow rank and the cause, one of `CAUSES`, of each run that
    `train_sabotaged` trains; judged by how many are right."""
    for name in SABOTAGED:
        match answer.get(name):
            case (int(), cause) if cause in CAUSES:
                pass
            case found:
                causes = ", ".join(f'"{cause}"' for cause in CAUSES)
                return Verdict(
                    complaint=f"for {name!r} it has {found!r}; give a rank and a "
                    f'cause, such as (0, "data"), the cause one of {causes}'
                )
    named = sum(tuple(answer[name]) == right for name, right in SABOTAGED.items())
    return Verdict(
        measured=f"{named} of {len(SABOTAGED)} runs have their rank and their cause",
        to_beat=f"{len(SABOTAGED)}",
        is_beaten=named == len(SABOTAGED),
    )


def two_launchers(files: Mapping[str, str | PathLike[str]]) -> Verdict:
    """`files` has, by launcher, what a script wrote with `--losses`; judged by the
    largest difference of the losses of a step."""
    if len(files) != 2:
        return Verdict(complaint=f"it takes the files of 2 launchers, not {len(files)}")
    first, second = map(losses_of, map(Path, files.values()))
    if first.keys() != second.keys():
        return Verdict(
            complaint=f"{len(first)} and {len(second)} steps have a loss; launch the "
            "same script twice"
        )
    apart = max((abs(first[step] - second[step]) for step in first), default=math.inf)
    return Verdict(
        measured=f"the largest difference of a step's losses is {apart:.2g}",
        to_beat="0",
        is_beaten=apart == 0.0,
    )


def losses_of(path: Path) -> dict[str, float]:
    """By step, the losses that a script has written."""
    with path.open() as file:
        return {row["step"]: float(row["loss"]) for row in csv.DictReader(file)}
