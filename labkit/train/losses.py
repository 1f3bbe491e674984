"""The losses of a script's run: shown as it goes, and written at its end."""

import csv
import math
import os
import time
from os import PathLike
from pathlib import Path

from labkit.checkpoint.exchange import all_gather_json
from labkit.checks import absolute
from labkit.records import LOSS_WEIGHT
from labkit.records import NOTICED_LOSS
from labkit.records import Batch
from labkit.records import significant

REFRESH_S = 5.0
"""From one line about the run to the next."""
_LOSSES = ("loss", NOTICED_LOSS)
_WEIGHTS = ("samples", LOSS_WEIGHT)

ByStep = dict[int, float]
Weighted = dict[int, tuple[float, float]]
"""Loss and weight by step."""


def check_file(path: str | PathLike[str] | None) -> Path | None:
    """Where losses are to be written; ValueError where they cannot be."""
    if path is None:
        return None
    found = absolute(path)
    if found.is_dir() or not found.parent.is_dir():
        is_what = "is a folder" if found.is_dir() else f"there is no {found.parent}"
        raise ValueError(f"--losses {found}: {is_what}; name a file in a folder")
    if not os.access(found if found.exists() else found.parent, os.W_OK):
        raise ValueError(f"--losses {found} cannot be written to; name another file")
    return found


class Losses:
    """The losses of one run on this rank, and at the end on all of them."""

    def __init__(self, path: Path | None, strategy: str) -> None:
        """`path` is where rank 0 writes them, if anywhere."""
        self._path = path
        self._strategy = strategy
        self._by_name: dict[str, ByStep] = {}
        self._shown_at = self._began = time.monotonic()
        self._rank = 0
        self._world_size = 1

    def begin(self, rank: int, world_size: int) -> None:
        """The run begins, on so many ranks that train."""
        self._rank, self._world_size = rank, world_size
        self._shown_at = self._began = time.monotonic()

    def take(self, batch: Batch) -> None:
        """Keep what is needed of a rank's records; in the emitter's thread."""
        for number, name in enumerate(batch.names):
            if name in (*_LOSSES, *_WEIGHTS):
                found = batch.records[batch.records["metric"] == number]
                steps, values = found["step"].tolist(), found["value"].tolist()
                self._by_name.setdefault(name, {}).update(
                    zip(steps, values, strict=True)
                )
        if self._rank == 0 and time.monotonic() - self._shown_at >= REFRESH_S:
            self._shown_at = time.monotonic()
            self._show_last()

    def finish(self) -> None:
        """The run has ended well on all ranks: rank 0 writes. Collective."""
        own = {name: self._weighted(name) for name in _LOSSES}
        of_all = [own]
        if self._world_size > 1:
            rows = {name: [*by_step.items()] for name, by_step in own.items()}
            of_all = [
                {name: {step: tuple(pair) for step, pair in each[name]} for name in own}
                for each in all_gather_json(rows, "a rank's losses")
            ]
        if self._rank != 0:
            return
        means = mean_by_step(of_one_kind(of_all))
        if self._path is not None:
            with self._path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["step", "loss"])
                writer.writerows(means.items())
        self._show_end(means)

    def _own(self) -> ByStep:
        """What the script logs as its loss counts before what was noticed."""
        return self._by_name.get("loss") or self._by_name.get(NOTICED_LOSS) or {}

    def _weighted(self, name: str) -> Weighted:
        """The loss of this name and its weight on this rank, by step."""
        weights: ByStep = {}
        for kind in _WEIGHTS:
            weights.update(self._by_name.get(kind, {}))
        return {
            step: (loss, weights.get(step, 1.0))
            for step, loss in self._by_name.get(name, {}).items()
        }

    def _show_last(self) -> None:
        if losses := self._own():
            step = max(losses)
            where = " on rank 0" if self._world_size > 1 else ""
            self._say(f"step {step}, loss {significant(losses[step])}{where}")

    def _show_end(self, means: ByStep) -> None:
        seconds = time.monotonic() - self._began
        noun = "rank" if self._world_size == 1 else "ranks"
        said = f"{self._world_size} {noun}, {significant(seconds)} s"
        if means:
            step = max(means)
            said += f", step {step}, loss {significant(means[step])}"
        if self._path is not None:
            said += f"; losses of {len(means)} steps in {self._path.name}"
        self._say(said)

    def _say(self, text: str) -> None:
        print(f"{self._strategy}: {text}", flush=True)


def of_one_kind(of_ranks: list[dict[str, Weighted]]) -> list[Weighted]:
    """What all ranks log as their loss, or else what was noticed: a loss that one rank
    alone logs may be a mean already."""
    having = [each for each in of_ranks if any(each.values())]
    all_log = all(each["loss"] for each in having)
    is_noticed = any(each[NOTICED_LOSS] for each in having)
    name = "loss" if all_log or not is_noticed else NOTICED_LOSS
    return [each[name] for each in having]


def mean_by_step(of_ranks: list[Weighted]) -> ByStep:
    """The mean over the ranks that have a step, by (loss, weight): the loss of its
    global batch."""
    found = {}
    for step in sorted(set().union(*of_ranks)):
        pairs = [each[step] for each in of_ranks if step in each]
        # A rank without samples has a loss of no meaning.
        pairs = [(loss, weight) for loss, weight in pairs if weight]
        total = math.fsum(weight for _, weight in pairs)
        found[step] = sum(loss * weight for loss, weight in pairs) / (total or 1.0)
    return found
