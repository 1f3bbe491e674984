"""Looks at a trial's metric while it runs, and stops it where that is of no use."""

import math
import threading
import time
from pathlib import Path
from typing import Any
from typing import Protocol

from labkit import timeouts
from labkit.notebook.execution.cell_execution import CellExecution
from labkit.notebook.execution.training_run import RunWatch
from labkit.notebook.kernel.output import say
from labkit.notebook.runs.run import Run
from labkit.notebook.trials.live_metric import LiveMetric
from labkit.notebook.trials.work import CHECKPOINT
from labkit.notebook.trials.work import OWN_FOLDER


class View(Protocol):
    """What shows the study while it runs."""

    def tick(self) -> None:
        """Called at every turn of the wait."""

    def clear_line(self) -> None:
        """Something else is about to be printed."""


class TrialWatch(RunWatch):
    """Looks at a trial's metric while it runs, and stops it where that is of no use."""

    def __init__(
        self,
        trial: Any,
        metric: str,
        deadline: float | None,
        view: View,
        said: set[str],
        checkpoint: Path | None,
        *,
        using_optuna: "threading.RLock",
        label: str = "",
        may_prune: bool = True,
    ) -> None:
        """`said` are the notes that trials before had under them; `using_optuna` is
        held while the trial is reported on; `label` is for what its ranks print;
        `may_prune` says whether it is compared with others."""
        self.run: Run | None = None
        """None until it has begun."""
        self.why_stopped = ""
        self.label = label
        self._trial = trial
        self._checkpoint = checkpoint
        self._is_own_folder = checkpoint is not None and not checkpoint.exists()
        self._name = metric
        self._deadline = deadline
        self._view = view
        self._said = said
        self._using_optuna = using_optuna
        self._may_prune = may_prune
        self._asked_at = math.inf
        self._is_to_end = False

    def begin(self, run: Run, execution: CellExecution) -> None:
        self._execution, self.run = execution, run
        self.metric = LiveMetric(run.collector, self._name)
        if self._checkpoint is not None:
            with self._using_optuna:
                self._trial.set_user_attr(CHECKPOINT, str(self._checkpoint))
                self._trial.set_user_attr(OWN_FOLDER, self._is_own_folder)
        if self._is_to_end and not execution.had_sigint:  # since a moment ago
            self.interrupt()

    def interrupt(self) -> None:
        """End the run with the study, from any thread, as soon as it has begun; the
        second time kill the ranks that do not stop."""
        self._is_to_end = True
        if self.run is not None:
            self._execution.had_sigint = True
            self._execution.interrupt()

    @property
    def was_interrupted(self) -> bool:
        """Whether the user interrupted the run, whatever else stopped it."""
        return self.run is not None and self._execution.had_sigint

    def tick(self) -> None:
        self._view.tick()
        now = time.monotonic()
        if self.why_stopped:
            if now > self._asked_at + timeouts.STEP_S:  # it takes no step
                self._asked_at = math.inf
                self._execution.interrupt()
        elif self._deadline is not None and now > self._deadline:
            self._stop("the time is over")
        else:
            self._report_points()

    def before_output(self) -> None:
        self._view.clear_line()

    def take_note(self, sentence: str) -> None:
        assert self.run is not None
        if sentence not in self._said:
            self._said.add(sentence)
            say(f"{self.run.name}: {sentence}")

    def _report_points(self) -> None:
        for place, value in self.metric.new_points():
            with self._using_optuna:
                self._trial.report(value, place)
                # The points after a stop do not come again, and belong to its curve.
                is_compared = self._may_prune and not self.why_stopped
                is_behind = (
                    is_compared and math.isfinite(value) and self._trial.should_prune()
                )
            if is_behind:
                self._stop("it fell behind")
            elif not self.why_stopped and not math.isfinite(value):
                self._stop(f"{self._name} is {value}")

    def _stop(self, why: str) -> None:
        self.why_stopped = why
        self._asked_at = time.monotonic()
        try:
            self._execution.stop_at_a_step()
        except RuntimeError:  # a rank says nothing
            self._execution.interrupt()

    def report_rest(self) -> None:
        """The run has ended: what there is of its curve. Nothing is pruned any more."""
        for place, value in self.metric.new_points(is_final=True):
            with self._using_optuna:
                self._trial.report(value, place)
