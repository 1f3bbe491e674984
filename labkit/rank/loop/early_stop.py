"""Stops a loop whose metric no longer improves, on all ranks at the same step."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import check_flag
from labkit.checks import is_number
from labkit.checks import short_repr
from labkit.rank.loop.arguments import type_and_value
from labkit.rank.loss.hooks import snapshot
from labkit.records import significant

Site = tuple[CodeType, int]
"""A call in the code: where in which function."""

BETTER = {"min": "lower", "max": "higher"}


@dataclass(frozen=True)
class StopRule:
    """When to stop, and whether the best state is then restored."""

    patience: int
    """So many values in a row that are no better than the best end the loop."""
    min_delta: float = 0.0
    """A value is better only if it is so by more than this."""
    mode: str = "min"
    restore_best: bool = False

    def __post_init__(self) -> None:
        check_count("patience", self.patience, "the values without an improvement")
        if not is_number(self.min_delta) or self.min_delta < 0:
            raise ValueError(
                f"min_delta is {short_repr(self.min_delta)}; it must be a number of at "
                "least 0: the smallest improvement that counts"
            )
        check_choice("mode", self.mode, BETTER)
        check_flag("restore_best", self.restore_best)


class EarlyStop:
    """The values of one metric so far, the same on all ranks."""

    def __init__(self, rule: StopRule) -> None:
        self.rule = rule
        self.best = math.nan
        self.best_at = ""
        """When that was, in words."""
        self.last = math.nan
        self.num_no_better = 0
        """Values since the best."""

    def see(self, value: float, at: str) -> bool:
        """Take the next value; whether it is the best so far. NaN never is."""
        rule = self.rule
        gain = self.best - value if rule.mode == "min" else value - self.best
        is_first = math.isnan(self.best) and not math.isnan(value)
        is_best = is_first or gain > rule.min_delta
        self.last = value
        self.num_no_better = 0 if is_best else self.num_no_better + 1
        if is_best:
            self.best, self.best_at = value, at
        return is_best

    @property
    def is_over(self) -> bool:
        """Whether there were too many values in a row that were no better."""
        return self.num_no_better >= self.rule.patience

    def why(self, what: str) -> str:
        """Why it is, in words; `what` names the metric."""
        rule = self.rule
        delta = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        times = f"{rule.patience} value{'s' * (rule.patience > 1)}"
        if math.isnan(self.best):
            return f"{what} was never a number in {times}"
        restored = "; the best state is restored" if rule.restore_best else ""
        return (
            f"in {times} {what} did not get {BETTER[rule.mode]}{delta} than its best, "
            f"{significant(self.best)} ({self.best_at}); the last is "
            f"{significant(self.last)}{restored}"
        )


class EarlyStops:
    """The early stops of a run, each by a metric of its own."""

    def __init__(
        self,
        folder: Path | None,
        *,
        mean: Callable[[float, float], float],
        save: Callable[[Path], None],
        restore: Callable[[Path], object],
        note: Callable[[str], None],
    ) -> None:
        """The best state is kept in `folder`, if the run has one. `mean(value, weight)`
        is that over the ranks, `save` and `restore` what `prepare` made, all of them
        collective."""
        self._folder = folder
        self._mean = mean
        self._save = save
        self._restore = restore
        self._note = note
        self._by_site: dict[Site, EarlyStop] = {}

    def check(self, rule: StopRule) -> None:
        """ValueError where the run cannot keep to it."""
        if rule.restore_best and self._folder is None:
            raise ValueError(
                "restore_best keeps the best state in the run's folder, and this run "
                "has none. A notebook's has one where LABKIT_RUNS is a folder that can "
                "be written to; in a script call save_checkpoint(folder) where the "
                "metric improves, and load_checkpoint(folder) in the end"
            )

    def clear(self) -> None:
        """Forget what calls in the cell have seen."""
        self._by_site.clear()

    def asked(self, rule: StopRule, value: float, at: str) -> bool:
        """Whether to stop, asked by a call in the cell. Collective."""
        site = calling_site()
        watch = self._by_site.get(site)
        if watch is None or watch.rule != rule:
            others = [each for key, each in self._by_site.items() if key != site]
            if rule.restore_best and any(each.rule.restore_best for each in others):
                raise ValueError(
                    "restore_best restores one best state, and another stop_early of "
                    "this cell keeps it already; leave it out of one of the two"
                )
            watch = self._by_site[site] = EarlyStop(rule)
        is_over = self.is_to_stop(watch, value, 1.0, at, "the metric of stop_early")
        if is_over:
            del self._by_site[site]
        return is_over

    def is_to_stop(
        self, watch: EarlyStop, value: float, weight: float, at: str, what: str
    ) -> bool:
        """Whether to stop, for all ranks alike, by the mean of their values.
        Collective."""
        if watch.see(self._mean(value, weight), at) and watch.rule.restore_best:
            assert self._folder is not None
            self._save(self._folder)
        if not watch.is_over:
            return False
        self.restore_best(watch)
        self._note(f"stopped early {at}: {watch.why(what)}")
        return True

    def restore_best(self, watch: EarlyStop) -> None:
        """Set what `prepare` made to the best state, if one was kept. Collective."""
        if watch.rule.restore_best and not math.isnan(watch.best):
            assert self._folder is not None
            self._restore(self._folder)


def number_of(metric: Any) -> float:
    """The value of a metric; ValueError for what is no number."""
    try:
        return float(snapshot(metric))
    except (ArithmeticError, TypeError, ValueError, RuntimeError):
        raise ValueError(
            "stop_early takes a number or a tensor of one element; found "
            f"{type_and_value(metric)}"
        ) from None


def calling_site() -> Site:
    """Which call in the code outside of labkit has led here."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("labkit.") and frame.f_back:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def rule_of_fit(
    monitor: str | None, names: list[str], **given: Any
) -> tuple[str, StopRule | None]:
    """The metric that `fit` monitors, one of `names`, and the rule of what is `given`,
    if there is one. ValueError for what cannot be."""
    if given["patience"] is None:
        usual = StopRule(1)
        others = {"monitor": monitor, **{k: v for k, v in given.items() if v != 0}}
        for name, value in others.items():
            if value is not None and value != getattr(usual, name, None):
                raise ValueError(
                    f"{name}={short_repr(value)} is about stopping early; give "
                    "patience as well, the epochs without an improvement"
                )
        return "", None
    if monitor is None:
        monitor = names[-1]
    check_choice("metric to monitor", monitor, names)
    return monitor, StopRule(**given)
