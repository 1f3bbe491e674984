"""Finds the rank that the others wait for."""

import numpy as np

from labkit.notebook.history.collector import Collector
from labkit.notebook.history.pace import step_seconds

LAG = 0.2
"""By how much longer than the others a rank must take for a step to be named."""
NUM_MEASURED = 3
"""How many measured steps are looked at, the newest."""
NUM_STEPS = 50
"""How many steps are looked at of ranks that do not wait for each other."""


def find_straggler(collector: Collector) -> tuple[int, float] | None:
    """The slowest rank, and by what share its step is longer than the median of the
    others; None where no rank stands out."""
    seconds = own_seconds(collector)
    if seconds is None:
        return None
    excess = lags(seconds)
    place = int(np.median(excess, axis=1).argmax())
    # Once is no proof: a rank may have been held up in one step.
    if excess[place].min() <= LAG:
        return None
    return collector.ranks[place], float(np.median(excess[place]))


def lag_by_rank(collector: Collector) -> dict[int, float]:
    """By what share each rank's step is longer than the median of the others; empty
    where that is not known."""
    seconds = own_seconds(collector)
    if seconds is None:
        return {}
    excess = np.median(lags(seconds), axis=1)
    return dict(zip(collector.ranks, excess.tolist(), strict=True))


def lags(seconds: np.ndarray) -> np.ndarray:
    """`seconds`, (num_ranks, num_steps), over the median of the other ranks, less 1."""
    places = range(len(seconds))
    others = [np.median(np.delete(seconds, i, axis=0), axis=0) for i in places]
    return seconds / np.stack(others) - 1.0


def own_seconds(collector: Collector) -> np.ndarray | None:
    """What each rank takes for a step: (num_ranks, num_steps), several steps.

    Where ranks wait for each other in collectives they all take equally long; their
    own time is that of a measured step without the wait. The first step is left out,
    in which states are made. Elsewhere it is the time between their records.
    """
    if len(collector.ranks) < 2:
        return None
    measured = [
        [
            found.seconds - sum(each.seconds or 0.0 for each in found.collectives)
            for found in collector.measurements[rank][1:]
            if all(each.seconds is not None for each in found.collectives)
        ]
        for rank in collector.ranks
    ]
    num_steps = min(map(len, measured))  # one rank's may still be on its way
    if num_steps >= 2:
        newest = slice(max(0, num_steps - NUM_MEASURED), num_steps)
        return np.maximum([own[newest] for own in measured], 1e-9)
    by_rank = [step_seconds(collector, rank, NUM_STEPS) for rank in collector.ranks]
    if min(map(len, by_rank)) < NUM_STEPS // 2:
        return None
    return np.maximum([[np.median(seconds)] for seconds in by_rank], 1e-9)
