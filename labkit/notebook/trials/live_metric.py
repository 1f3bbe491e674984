"""A run's metric as one curve, the mean over its ranks, as it grows."""

import numpy as np

from labkit.notebook.history.collector import Collector
from labkit.notebook.history.collector import GrowingArray
from labkit.records import LOSS_WEIGHT

DENSE = 8
"""So many of the first values are looked at each by itself."""
GROWTH = 1.25
"""Between the values that are looked at then."""
TAIL = 0.1
"""The part of the losses whose mean is that of the run."""

Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Steps, values, and what each counts."""


class LiveMetric:
    """The values of one metric of a run, in their order; of all its ranks together.

    They are looked at in the same places of every run, so that runs can be compared:
    the more there are, the fewer, each as the mean since the place before. A look pays
    for what is new, not for all that there is.
    """

    def __init__(self, collector: Collector, metric: str) -> None:
        self._collector = collector
        self._metric = metric
        self._start_over()

    def _start_over(self) -> None:
        self._num_seen = dict.fromkeys(self._collector.ranks, 0)
        """Records of each rank."""
        self._parts: dict[int, Part] = {}
        """What ranks have of steps that others have not reached."""
        self._reached = dict.fromkeys(self._collector.ranks, -1)
        """The last step of which each rank has sent the metric."""
        self._values = GrowingArray(np.dtype(float))
        self._last = 0
        """The place that was looked at last."""

    def new_points(self, *, is_final: bool = False) -> list[tuple[int, float]]:
        """The places that are reached since it was last asked, and their values."""
        values = self.values(is_final=is_final)
        found = []
        while (place := next_place(self._last)) <= len(values):
            found.append((place, float(values[self._last : place].mean())))
            self._last = place
        return found

    def final(self) -> float | None:
        """The one value of a run that has ended; None where it has none."""
        values = self.values(is_final=True)
        if not len(values):
            return None
        if self._metric != "loss":
            return float(values[-1])
        return float(values[-max(1, round(TAIL * len(values))) :].mean())

    def values(self, *, is_final: bool = False) -> np.ndarray:
        """One for each step that has any, up to the last of which all ranks have sent
        theirs: the mean over those that have."""
        if any(
            self._collector.num_records[rank] < num_seen
            for rank, num_seen in self._num_seen.items()
        ):
            self._start_over()  # the run has, from a checkpoint
        if self._take_new(is_final) or is_final:
            self._add_whole_steps(is_final)
        return self._values.view()

    def _take_new(self, is_final: bool) -> bool:
        """Take the records that have come; whether there were any."""
        is_new = False
        for rank, num_seen in self._num_seen.items():
            records = self._collector.records(rank)[num_seen:]
            names = self._collector.metrics(rank)
            if self._metric == "loss" and len(records) and not is_final:
                # Of the last step a loss may be here, and its weight on its way.
                is_last = records["step"][::-1] == records["step"][-1]
                num_last = len(records) if is_last.all() else int(is_last.argmin())
                records = records[: len(records) - num_last]
            self._num_seen[rank] += len(records)
            is_new |= len(records) > 0
            if self._metric not in names:
                continue
            ours = records[records["metric"] == names.index(self._metric)]
            if not len(ours):
                continue
            self._reached[rank] = max(self._reached[rank], int(ours["step"].max()))
            weights = np.ones(len(ours))
            for metric in ("samples", LOSS_WEIGHT) if self._metric == "loss" else ():
                if metric in names:
                    known = records[records["metric"] == names.index(metric)]
                    weights = where_known(ours["step"], known, weights)
            part = ours["step"], ours["value"], weights
            before = self._parts.get(rank)
            self._parts[rank] = part if before is None else joined([before, part])
        return is_new

    def _add_whole_steps(self, is_final: bool) -> None:
        # What a rank logs at a step comes before its next step: it may log nothing.
        reached = [
            max(step, self._collector.steps[rank] - 1)
            for rank, step in self._reached.items()
        ]
        last = max(reached) + 1 if is_final else min(reached)
        whole = [
            (steps[steps <= last], values[steps <= last], weights[steps <= last])
            for steps, values, weights in self._parts.values()
        ]
        if not any(len(steps) for steps, _, _ in whole):
            return
        steps, values, weights = joined(whole)
        _, place = np.unique(steps, return_inverse=True)
        sums = np.bincount(place, weights * values)
        self._values.extend(sums / np.maximum(np.bincount(place, weights), 1e-300))
        self._parts = {
            rank: (steps[steps > last], values[steps > last], weights[steps > last])
            for rank, (steps, values, weights) in self._parts.items()
        }


def where_known(
    steps: np.ndarray, known: np.ndarray, otherwise: np.ndarray
) -> np.ndarray:
    """The values of the records `known` at these steps."""
    if not len(known):
        return otherwise
    at = np.searchsorted(known["step"], steps).clip(max=len(known) - 1)
    return np.where(known["step"][at] == steps, known["value"][at], otherwise)


def joined(parts: list[Part]) -> Part:
    steps, values, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
    return steps, values, weights


def next_place(last: int) -> int:
    """The place that is looked at after `last`."""
    return last + 1 if last < DENSE else max(last + 1, round(GROWTH * last))
