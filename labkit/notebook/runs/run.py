"""The handle of a training run: waits for it, stops it, shows it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Protocol

from labkit import timeouts
from labkit.notebook.history.collector import Collector
from labkit.notebook.runs.progress import marks
from labkit.notebook.runs.progress import progress_line
from labkit.notebook.runs.progress import remarks
from labkit.notebook.runs.progress import status_line
from labkit.notebook.runs.record import RunRecord
from labkit.train_options import TrainOptions

if TYPE_CHECKING:
    from labkit.notebook.kernel.background import Job
    from labkit.notebook.plots.figure import RunFigure


class Execution(Protocol):
    """What runs a run: `labkit.notebook.execution.cell_execution.CellExecution`."""

    def stop_at_a_step(self) -> None:
        """Stop every rank after the same optimizer step."""

    def interrupt(self) -> None:
        """Stop every rank; the second time kill those that do not."""


class Run(RunRecord):
    """One training run on all its ranks.

    `state` is "running", "finished", "failed" or "interrupted"; of a run that was
    loaded from disk also "lost": its notebook's kernel died while it ran.
    """

    def __init__(
        self,
        name: str,
        strategy: str,
        code: str,
        collector: Collector,
        options: TrainOptions | None = None,
    ) -> None:
        super().__init__(name, strategy, code, collector, options)
        self.execution: Execution | None = None
        """What runs it, where it is of this lab."""
        self.has_ended = threading.Event()
        self.job: Job | None = None
        """What runs it in the background."""
        self._reload: Callable[[], None] = lambda: None

    def refresh(self) -> "Run":
        """Take in what was written since, where another kernel runs it; itself."""
        # Ranks outlive their kernel, but not for long.
        if self.state in ("running", "lost"):
            self._reload()
        return self

    def to_tensorboard(self, folder: str | Path) -> None:
        """Write all records as event files for TensorBoard, a sub-folder a rank.

        Raises RuntimeError where tensorboard is not installed.
        """
        from labkit.notebook.runs.tensorboard import write_events

        write_events(self.collector, Path(folder), began=self.info["began"])

    def wait(self, timeout: float | None = None) -> "Run":
        """Wait until a run in the background has ended; then this run.

        Raises what the cell would have raised, and TimeoutError after `timeout`
        seconds. An interrupt ends the waiting, and not the run.
        """
        if self.job is not None and not self.job.wait(timeout):
            raise TimeoutError(f"{self.name} still runs after {timeout:g} s")
        return self

    def stop(self, timeout: float = timeouts.STEP_S) -> None:
        """Stop every rank after the same optimizer step; variables are kept.

        Ranks that have not come so far in `timeout` seconds are interrupted where they
        are. Does nothing where the run has ended.
        """
        if self.execution is None or self.state != "running":
            return
        try:
            self.execution.stop_at_a_step()
        except RuntimeError:
            self.interrupt()
        if self.job is not None and not self.job.join(timeout):
            print(f"labkit: {self.name} took no step for {timeout:g} s: interrupted")
            self.interrupt()

    def interrupt(self, timeout: float | None = None) -> None:
        """Stop a run in the background wherever its ranks are, and wait for its end.

        The second time, ranks that still run are ended, and restarted.
        """
        if self.execution is None or self.job is None or self.state != "running":
            return
        self.execution.interrupt()
        self.job.join(timeout)

    def end(self, state: str) -> None:
        super().end(state)
        self.has_ended.set()

    def plot(self, *, log_scale: bool | None = None) -> "RunFigure":
        """Loss, memory and every other metric per rank, and memory by component, as the
        live picture showed them at the end; `log_scale` sets that of the loss."""
        from labkit.notebook.plots.memory_bars import stack_memory
        from labkit.notebook.plots.run_plot import RunPlot

        if log_scale is None:
            log_scale = self.log_scale
        plot = RunPlot(self.collector, log_scale=log_scale)
        plot.update(
            progress_line(self),
            remarks=remarks(self),
            marks=marks(self),
            is_final=True,
        )
        bars = self.memory_beside_theory()
        if bars is not None:
            stack_memory(plot.add_bars(), bars, theory=[len(bars) - 1])
        return plot.figure

    def status_line(self) -> str:
        """How far the run has come, and what is not as it should be, in one line."""
        return status_line(self)
