"""A run's metric as one curve, the mean over its ranks, as it grows."""

import numpy as np

from labkit.notebook.history.collector import Collector
from labkit.records import LOSS_WEIGHT

DENSE = 8
"""So many of the first values are looked at each by itself."""
GROWTH = 1.25
"""Between the values that are looked at then."""
TAIL = 0.1
"""The part of the losses whose mean is that of the run."""


class LiveMetric:
    """The values of one metric of a run, in their order; of all its ranks together.

    They are looked at in the same places of every run, so that runs can be compared:
    the more there are, the fewer, each as the mean since the place before.
    """

    def __init__(self, collector: Collector, metric: str) -> None:
        self._collector = collector
        self._metric = metric
        self._last = 0
        """The place that was looked at last."""
        self._num_records = -1

    def new_points(self) -> list[tuple[int, float]]:
        """The places that are reached since it was last asked, and their values."""
        num_records = sum(self._collector.num_records.values())
        if num_records == self._num_records:
            return []
        self._num_records = num_records
        values = self.values()
        found = []
        while (place := next_place(self._last)) <= len(values):
            found.append((place, float(values[self._last : place].mean())))
            self._last = place
        return found

    def values(self) -> np.ndarray:
        """One for each step up to the last that all ranks have reached which log it:
        the mean over them."""
        found = [self._of_rank(rank) for rank in self._collector.ranks]
        found = [each for each in found if len(each[0])]
        if not found:
            return np.empty(0)
        columns = zip(*found, strict=True)
        steps, values, weights = (np.concatenate(column) for column in columns)
        last = min(of_rank[0][-1] for of_rank in found)
        _, place = np.unique(steps, return_inverse=True)
        sums = np.bincount(place, weights * values)
        means = sums / np.maximum(np.bincount(place, weights), 1e-300)
        return means[: len(np.unique(steps[steps <= last]))]

    def _of_rank(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps, values, and what each counts: as in `RunRecord.mean_loss`."""
        series = self._collector.series(rank, self._metric)
        steps, values = series["step"], series["value"]
        weights = np.ones(len(values))
        for metric in ("samples", LOSS_WEIGHT) if self._metric == "loss" else ():
            known = self._collector.series(rank, metric)
            if len(known):
                at = np.searchsorted(known["step"], steps).clip(max=len(known) - 1)
                is_there = known["step"][at] == steps
                weights = np.where(is_there, known["value"][at], weights)
        return steps, values, weights

    def final(self) -> float | None:
        """The run's one value; None where it has none."""
        values = self.values()
        if not len(values):
            return None
        if self._metric != "loss":
            return float(values[-1])
        return float(values[-max(1, round(TAIL * len(values))) :].mean())


def next_place(last: int) -> int:
    """The place that is looked at after `last`."""
    return last + 1 if last < DENSE else max(last + 1, round(GROWTH * last))
