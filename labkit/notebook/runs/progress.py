"""Reports a run's progress and problems in one line."""

import math

from labkit.notebook.history.collector import Collector
from labkit.notebook.history.curves import MEMORY
from labkit.notebook.history.marks import Mark
from labkit.notebook.history.pace import seconds_a_step
from labkit.notebook.history.pace import steps_per_s
from labkit.notebook.history.stragglers import find_straggler
from labkit.notebook.runs.record import RunRecord
from labkit.rank_spec import format_ranks
from labkit.records import significant

MAX_TROUBLES = 2
MIN_SECONDS = 1.0
"""How long a run takes at least for a rank to be called slow: in less it may be so by
chance."""
RECENT_STEPS = 500
"""How many of the newest steps give the rate of a run that is running."""


def status_line(run: RunRecord) -> str:
    """All in one line: "run-1: ddp on 2 ranks, epoch 2/3, step 40/69, ..."."""
    return ", ".join([progress_line(run), *remarks(run)])


def progress_line(run: RunRecord) -> str:
    """Epoch, step of total, rates, and the time that is left or that it took."""
    ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
    parts = [f"{run.name}: {run.strategy} on {ranks}"]
    is_running = run.state == "running"
    if not is_running:
        parts.append(run.state)
    if run.resumed_from is not None:
        parts.append(f"resumed from step {run.resumed_from:,}")
    if restarts := len(run.restarts):
        parts.append(f"{restarts} restart{'s' * (restarts > 1)}")
    # Of the rank that is furthest, as the step is.
    progress = max(run.collector.progress.values(), key=lambda each: each.epoch)
    step, total = run.num_steps, planned_steps(run)
    if progress.epoch:
        of = f"/{progress.epochs}" if progress.epochs else ""
        parts.append(f"epoch {progress.epoch}{of}")
    if total:
        parts.append(f"step {step:,}/{total:,}")
    else:
        length = progress.steps_per_epoch or 0
        in_epoch = step - (progress.epoch - 1) * length
        # It is not where a loop leaves its epochs early, or steps once in several
        # batches.
        is_of_epoch = 0 <= in_epoch <= length and length > 0
        parts.append(
            f"step {in_epoch:,}/{length:,} of the epoch"
            if is_of_epoch
            else f"step {step:,}"
        )
    parts += rates(run, RECENT_STEPS if is_running else None)
    if not is_running:
        parts.append(duration(run.seconds, digits=1))
    elif total:
        pace = seconds_a_step(run.collector)
        if pace is not None:
            parts.append(f"{duration(max(0, total - step) * pace)} left")
    return ", ".join(parts)


def remarks(run: RunRecord) -> list[str]:
    """What is not as it should be: a slow rank, NaN, lost records."""
    found = []
    straggler = find_straggler(run.collector)
    if straggler is not None and run.elapsed() > MIN_SECONDS:
        rank, lag = straggler
        others = [other for other in run.collector.ranks if other != rank]
        whom = "the median" if len(others) > 1 else format_ranks(others)
        much = (
            f"takes {lag:.0%} longer than {whom}"
            if lag < 1
            else f"takes {1 + lag:.3g} times as long as {whom}"
        )
        found.append(f"rank {rank} is slowest: {much}")
    found += troubles(run.collector)[:MAX_TROUBLES]
    if run.collector.num_lost:
        found.append(f"{run.collector.num_lost} records lost")
    return found


def marks(run: RunRecord) -> list[Mark]:
    """The steps at which ranks died, and those that the run resumed from."""
    found: dict[Mark, None] = {}
    for restart in run.restarts:
        found[Mark(restart.died_at, f"{format_ranks(restart.ranks)} died", True)] = None
        found[Mark(restart.step, f"resumed from\nstep {restart.step:,}")] = None
    return list(found)


def memory_is_of(run: RunRecord) -> str:
    """What the memory at a step is, in words."""
    devices = run.info.get("devices") or ["cpu"]
    if str(devices[0]).startswith("cuda"):
        return "after each step"
    return "peak of measured steps"


def planned_steps(run: RunRecord) -> int | None:
    """Optimizer steps of the whole run, where its loop has said how many."""
    progress = run.collector.progress[run.collector.ranks[0]]
    if progress.epochs and progress.steps_per_epoch:
        return progress.epochs * progress.steps_per_epoch
    return None


def rates(run: RunRecord, num_steps: int | None) -> list[str]:
    """Steps, samples and tokens a second of all ranks together, where known.

    Ranks among which layers are divided have the same samples, which count once.
    """
    rate = steps_per_s(run.collector, num_steps=num_steps)
    if rate is None:
        return []
    parts = [f"{significant(rate)} steps/s"]
    num_alike = max((model.num_parts for model in run.models), default=1)
    curves = run.collector.curves
    with curves.lock:
        curves.update()
        for metric in ("samples", "tokens"):
            count = curves.per_step(metric)
            if count is not None:
                parts.append(f"{significant(rate * count / num_alike)} {metric}/s")
    return parts


def troubles(collector: Collector) -> list[str]:
    """Where each metric was NaN or infinite first, the loss before others: "rank 1:
    loss is NaN from step 14 on"."""
    curves = collector.curves
    with curves.lock:
        curves.update()
        all_troubles = curves.non_finites()
    by_metric: dict[str, dict[int, tuple[int, str, bool]]] = {}
    for (rank, metric), trouble in all_troubles.items():
        if metric != MEMORY:
            key = (trouble.step, trouble.word, trouble.lasts)
            by_metric.setdefault(metric, {})[rank] = key
    found = []
    for metric in sorted(by_metric, key=lambda name: name != "loss"):
        ranks = by_metric[metric]
        first = min(ranks.values(), key=lambda key: key[0])
        step, word, lasts = first
        where = format_ranks(rank for rank, key in ranks.items() if key == first)
        verb = "is" if lasts else "was"
        when = f"from step {step:,} on" if lasts else f"at step {step:,}"
        later = sum(key != first for key in ranks.values())
        then = f", later {later} more rank{'s' * (later > 1)}" if later else ""
        found.append(f"{where}: {metric} {verb} {word} {when}{then}")
    return found


def duration(seconds: float, *, digits: int = 0) -> str:
    """A time to read: "45 s", "1 min 20 s", "2 h 5 min", "3 d 4 h"."""
    if digits and seconds < 60:
        # "0.0 s" would be no time at all.
        return f"{seconds:.{digits + (seconds < 0.05)}f} s"
    whole = math.ceil(seconds)
    for unit, name, part, part_name in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // part} {part_name}"
    return f"{whole} s"
