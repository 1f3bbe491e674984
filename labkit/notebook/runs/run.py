"""The handle of a training run: waits for it, stops it, shows it."""

import functools
import math
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol

from labkit import timeouts
from labkit.checks import UserError
from labkit.checks import steps_to_profile
from labkit.notebook.export.cells import Before
from labkit.notebook.export.needed import RunFacts
from labkit.notebook.runs.progress import marks
from labkit.notebook.runs.progress import memory_is_of
from labkit.notebook.runs.progress import progress_line
from labkit.notebook.runs.progress import remarks
from labkit.notebook.runs.progress import status_line
from labkit.notebook.runs.record import RunRecord
from labkit.records import PROFILE_FOLDER
from labkit.records import TRACE_FILE

if TYPE_CHECKING:
    from labkit.notebook.kernel.background import Job
    from labkit.notebook.plots.figure import RunFigure
    from labkit.notebook.profile.step_profile import StepProfile


class Execution(Protocol):
    """What runs a run: `labkit.notebook.execution.cell_execution.CellExecution`."""

    def stop_at_a_step(self) -> None:
        """Stop every rank after the same optimizer step."""

    def interrupt(self) -> None:
        """Stop every rank; the second time kill those that do not."""


@dataclass(eq=False, repr=False)
class Run(RunRecord):
    """One training run on all its ranks: `Lab.train` and `load_run` return it.

    Attributes
    ----------
    name, strategy, code : str
        What the run is called, the strategy that it ran under, and what was run.
    state : {"running", "finished", "failed", "interrupted", "lost"}
        A run loaded from disk is "lost" where its kernel died while it ran.
    options : TrainOptions
        Those of the training step, as `options.precision`.
    seconds : float
        How long the cell ran.
    folder : Path or None
        Where the run is on disk.
    info : dict
        The rest of what is known of it: seed, config, devices, backend, versions, when
        and where it ran and, once it has ended, the outcome on each rank.
    """

    on_refresh: "Callable[[Run], None] | None" = field(default=None, kw_only=True)
    """Reads what another kernel has written of it since."""
    execution: Execution | None = field(default=None, init=False)
    """What runs it, where it is of this lab; None when it has ended."""
    job: "Job | None" = field(default=None, init=False)
    """What runs it in the background."""
    before: Before | None = field(default=None, init=False)
    """What had run in this kernel when it began."""
    in_lab: Sequence[int] = field(default=(), init=False)
    """The numbers in its lab of the ranks that it runs on, in order."""
    has_ended: threading.Event = field(default_factory=threading.Event, init=False)

    def refresh(self) -> "Run":
        """Read what was written since, where another kernel runs it.

        Returns
        -------
        Run
            This run.
        """
        # Ranks outlive their kernel, but not for long.
        if self.on_refresh is not None and self.state in ("running", "lost"):
            self.on_refresh(self)
        return self

    def to_tensorboard(self, folder: str | Path) -> None:
        """Write all records as event files for TensorBoard.

        Parameters
        ----------
        folder : str or path
            Where they are written, each rank's in a sub-folder.

        Raises
        ------
        RuntimeError
            Where tensorboard is not installed.
        """
        from labkit.notebook.runs.tensorboard import write_events

        write_events(self.collector, Path(folder), began=self.info["began"])

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        style: str | None = None,
        force: bool = False,
    ) -> list[str]:
        """Write the run, with the cells that it needs, as a script for `torchrun`.

        At the same number of ranks the script has the losses of this run, step by step.

        Parameters
        ----------
        path : str or path
            The script's file.
        style : {"plain", "labkit"}, optional
            Plain PyTorch, as in its tutorials, or a script that imports `labkit.train`;
            by default plain where it is certain to have the same losses.
        force : bool, default False
            Replace a file that is there.

        Returns
        -------
        list of str
            What there is to know of the script, in sentences.

        Raises
        ------
        ValueError
            For a run that cannot be a script, or not in this style, or a file that
            cannot be written; nothing is written then.
        """
        from labkit.notebook.export.script import check_script_file
        from labkit.notebook.export.script import check_style
        from labkit.notebook.export.script import script_of
        from labkit.notebook.export.script import write_script

        check_style(style)
        file = check_script_file(path, force=force)
        script = script_of(self._facts(), file.name, style)
        write_script(file, script.text)
        return list(script.notes)

    def _facts(self) -> RunFacts:
        """What a script is made from."""
        checkpoints = self.info.get("checkpoints") or {}
        samples: frozenset[tuple[int, ...]] = frozenset()
        if "samples" in self.history:
            # What `log` adds to a step is in rows of its own.
            steps = self.history.dropna(subset="samples")
            by_rank = steps.pivot(index="step", columns="rank", values="samples")
            rows = by_rank.dropna().astype(int).drop_duplicates()
            samples = frozenset(rows.itertuples(index=False, name=None))
        return RunFacts(
            self.name,
            self.strategy,
            self.code,
            self.world_size,
            self.options,
            seed=self.info.get("seed", 0),
            config=self.info.get("config") or {},
            before=self.before,
            checkpoints=checkpoints.get("directory"),
            resumed_from=self.resumed_from,
            command=self.info.get("command"),
            samples=samples,
            ranks_per_host=self.info.get("ranks_per_host") or (self.world_size,),
        )

    def wait(self, timeout: float | None = None) -> "Run":
        """Wait until a run in the background has ended.

        An interrupt ends the waiting, and not the run.

        Parameters
        ----------
        timeout : float, optional
            In seconds; by default there is no limit.

        Returns
        -------
        Run
            This run.

        Raises
        ------
        RankError, Interrupted, CellTimeoutError
            What `Lab.train` would have raised without `background`.
        TimeoutError
            If the run has not ended after `timeout` seconds.
        """
        self._check_runs_here()
        if self.job is not None and not self.job.wait(timeout):
            raise TimeoutError(
                f"{self.name} still runs after {timeout:g} s; wait() or stop() it"
            )
        return self

    def stop(self, timeout: float = timeouts.STEP_S) -> None:
        """Stop every rank after the same optimizer step; they keep their variables.

        Does nothing where the run has ended.

        Parameters
        ----------
        timeout : float, default 30
            Ranks that have not reached that step after so many seconds are interrupted
            where they are.
        """
        self._check_runs_here()
        execution = self.execution
        if execution is None or self.state != "running":
            return
        try:
            execution.stop_at_a_step()
        except RuntimeError:
            self.interrupt()
        if self.job is not None and not self.job.join(timeout):
            print(f"labkit: {self.name} took no step for {timeout:g} s: interrupted")
            self.interrupt()

    def interrupt(self, timeout: float | None = None) -> None:
        """Stop a run in the background wherever its ranks are, and wait for its end.

        The second time, ranks that still run are killed and restarted.

        Parameters
        ----------
        timeout : float, optional
            How many seconds to wait; by default without a limit.
        """
        self._check_runs_here()
        execution = self.execution
        if execution is None or self.job is None or self.state != "running":
            return
        execution.interrupt()
        self.job.join(timeout)

    def _check_runs_here(self) -> None:
        """UserError for what was read from disk, and of whose end nothing is known: to
        do nothing would seem to have done it."""
        if self.on_refresh is not None and self.refresh().state == "running":
            raise UserError(
                f"{self.name} was read from disk and still runs; stop it, or wait for "
                "it, in the kernel that runs it, with the Run that %%dist_train or "
                "Lab.train returned there, which current_lab().runs has too"
            )

    def end(self, state: str, *, seconds: float | None = None) -> None:
        super().end(state, seconds=seconds)
        self.has_ended.set()

    def catch_up(
        self, state: str, *, seconds: float, info: dict[str, Any], mismatches: list[str]
    ) -> None:
        """Take over what another kernel has written about the run.

        Parameters
        ----------
        state : str
            One of `RUN_STATES`.
        seconds : float
            How long the cell ran.
        info : dict
            As the attribute.
        mismatches : list of str
            As the property.
        """
        if state == "running":
            self._started = time.monotonic() - (time.time() - info["began"])
        self.seconds = seconds
        self.info = info
        self._mismatches = mismatches
        self.state = state  # last: other threads read the rest by it
        if state != "running":
            self.has_ended.set()

    def plot(self, *, log_scale: bool | None = None) -> "RunFigure":
        """Plot loss, memory and metrics per rank, and the memory within a step.

        Parameters
        ----------
        log_scale : bool, optional
            Plot the loss on a log scale; by default as the live picture was.

        Returns
        -------
        RunFigure
            A matplotlib Figure that displays itself.
        """
        from labkit.notebook.plots.run_plot import RunPlot

        if log_scale is None:
            log_scale = self.log_scale
        plot = RunPlot(
            self.collector, log_scale=log_scale, memory_is=memory_is_of(self)
        )
        plot.update(
            progress_line(self),
            remarks=remarks(self),
            marks=marks(self),
            is_final=True,
        )
        memory = self.memory_beside_theory()
        if memory is not None:
            plot.add_memory(memory, self.peak_moments())
        return plot.figure

    @functools.cached_property
    def profile(self) -> "StepProfile":
        """The steps that `--profile` has recorded: its text says why they are slow.

        ValueError for a run that has none.
        """
        from labkit.notebook.profile.step_profile import StepProfile

        if not self.has_profile or self.folder is None:
            raise ValueError(
                f"{self.name} has no profile; run it again with --profile "
                "(lab.train(..., profile=True)) and at least 13 steps, or choose "
                "earlier steps: --profile 2-4"
            )
        return StepProfile(
            self.name,
            self.strategy,
            self.folder / PROFILE_FOLDER,
            self.collector.ranks,
            slowdown=self._slowdown_by_profiler(),
            memory=self.step_memory,
        )

    @property
    def has_profile(self) -> bool:
        """Whether some of its steps were recorded by `--profile`."""
        if self.folder is None:
            return False
        folder = self.folder / PROFILE_FOLDER
        return any(
            (folder / TRACE_FILE.format(r)).exists() for r in self.collector.ranks
        )

    def _slowdown_by_profiler(self) -> float | None:
        """How many times as long as the others recorded steps took."""
        if not self.options.profile or self.restarts:
            return None  # which steps were recorded depends on the attempt
        recorded = steps_to_profile(self.options.profile, self.resumed_from or 0)
        seconds = self.history.groupby("step")["seconds"].max().diff()
        # The first ones make what later ones use; as a recording ends it is written.
        usual = seconds[seconds.index > seconds.index.min() + 3]
        around = range(recorded[0] - 1, recorded[-1] + 2)
        others = usual[~usual.index.isin(around)].median()
        during = seconds[seconds.index.isin(recorded)].median()
        ratio = float(during / others)
        return ratio if math.isfinite(ratio) else None

    def plot_buckets(self) -> "RunFigure":
        """Plot the gradients that DDP sends together.

        Returns
        -------
        RunFigure
            A matplotlib Figure that displays itself.

        Raises
        ------
        ValueError
            For a run of which no buckets are known.
        """
        from labkit.notebook.plots.memory_bars import plot_buckets

        if self.buckets.empty:
            raise ValueError(
                f"{self.name} ({self.strategy}) has no buckets: a run under ddp has "
                "them, from its first step on and without --average-every"
            )
        return plot_buckets(self.buckets)

    def plot_schedule(self) -> "RunFigure":
        """Plot which microbatch each rank had when, and the time that ranks waited.

        Returns
        -------
        RunFigure
            A matplotlib Figure that displays itself.

        Raises
        ------
        ValueError
            For a run of which no schedule is known.
        """
        from labkit.notebook.plots.schedule_plot import plot_schedule

        if self.schedule.empty:
            raise ValueError(
                f"{self.name} ({self.strategy}) has no schedule: a run of fit under "
                "pipeline has one after some steps, ten at most, where each batch has "
                "microbatches of equal size, no fewer than there are stages. In a loop "
                "of your own autograd orders the backward passes, and none is timed by "
                "itself"
            )
        return plot_schedule(self.schedule, self.options.schedule)

    def status_line(self) -> str:
        """Report progress and problems in one line.

        Returns
        -------
        str
            As "run-1: ddp on 2 ranks, epoch 2/3, step 40/69, ...".
        """
        return status_line(self)
