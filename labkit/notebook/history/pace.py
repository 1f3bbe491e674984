"""Measures how long the steps of a run take."""

from collections.abc import Iterable

import numpy as np

from labkit.notebook.history.collector import Collector

_BLOCK_RECORDS = 2**16


def steps_per_s(
    collector: Collector,
    ranks: Iterable[int] | None = None,
    num_steps: int | None = None,
) -> float | None:
    """Optimizer steps a second of the slowest of `ranks` (all by default), of all steps
    or of about the last `num_steps`; None before the second step.

    By the median step: some are slow because they are measured, the first or a
    validation.
    """
    ranks = collector.ranks if ranks is None else ranks
    found = [step_seconds(collector, rank, num_steps) for rank in ranks]
    medians = [
        float(np.median(seconds, overwrite_input=True))
        for seconds in found
        if len(seconds)
    ]
    paces = [seconds for seconds in medians if seconds > 0]
    return 1.0 / max(paces) if paces else None


def seconds_a_step(collector: Collector) -> float | None:
    """The mean since the first step, with all that lies between: validations too."""
    paces = []
    for rank in collector.ranks:
        records = collector.records(rank)
        if len(records) and collector.steps[rank] > records["step"][0]:
            seconds = records["seconds"][-1] - records["seconds"][0]
            paces.append(seconds / (collector.steps[rank] - records["step"][0]))
    return float(max(paces)) if paces else None


def step_seconds(
    collector: Collector, rank: int, num_steps: int | None = None
) -> np.ndarray:
    """Seconds between a rank's steps that left records; of all, or of about the last
    `num_steps`."""
    records = collector.records(rank)
    if num_steps is not None:
        logged = [n for n in collector.metrics(rank) if not n.startswith("(")]
        records = records[-num_steps * max(1, len(logged)) :]
    steps = records["step"]
    if (steps[1:] < steps[:-1]).any():  # the cell's `log(step=)` goes back
        steps, first = np.unique(steps, return_index=True)
        return np.diff(records["seconds"][first]) / np.diff(steps)
    return _in_order(records)


def _in_order(records: np.ndarray) -> np.ndarray:
    """What `step_seconds` returns, of records whose steps never go back.

    In blocks: arrays of all steps would take as much memory as the records.
    """
    steps = records["step"]
    is_next = steps[1:] != steps[:-1]
    found = np.empty(np.count_nonzero(is_next))
    last, num_found = records[:1], 0
    for begin in range(0, len(is_next), _BLOCK_RECORDS):
        block = slice(begin, begin + _BLOCK_RECORDS)
        firsts = np.concatenate([last, records[1:][block][is_next[block]]])
        last = firsts[-1:]
        seconds = np.diff(firsts["seconds"]) / np.diff(firsts["step"])
        found[num_found : num_found + len(seconds)] = seconds
        num_found += len(seconds)
    return found
