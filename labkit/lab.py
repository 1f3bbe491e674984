"""Lab: a cluster of ranks, and the runs on it."""

import contextlib
import importlib
import os
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from labkit import serialization
from labkit import timeouts
from labkit.checks import UserError
from labkit.checks import check_code
from labkit.checks import check_flag
from labkit.checks import check_hang_after
from labkit.checks import check_pushed_name
from labkit.checks import check_timeout
from labkit.checks import short_repr
from labkit.notebook.cluster import transfer
from labkit.notebook.cluster.change import place_anew
from labkit.notebook.cluster.placement import LOADING_TORCH
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.cluster.placement import in_words
from labkit.notebook.cluster.placement import place_on_hosts
from labkit.notebook.execution.options import OF_SCRIPT_RUNS
from labkit.notebook.execution.options import RunOptions
from labkit.notebook.execution.options import check_options
from labkit.notebook.execution.options import plan_checkpoints
from labkit.notebook.export.cells import Past
from labkit.notebook.kernel import interrupts
from labkit.notebook.kernel.output import execution_count
from labkit.notebook.kernel.output import is_notebook
from labkit.notebook.kernel.output import say
from labkit.notebook.kernel.output import working_directory
from labkit.notebook.kernel.pickled_function import cell_sources
from labkit.notebook.live import render_process
from labkit.notebook.tuning.options import TuneOptions
from labkit.options import documented
from labkit.options import options_of
from labkit.rank_spec import Ranks
from labkit.rank_spec import format_ranks
from labkit.rank_spec import parse_ranks
from labkit.records import CellSpec
from labkit.records import ScriptSpec
from labkit.step_folders import alone_in

if TYPE_CHECKING:
    import pandas as pd

    from labkit.notebook.cluster.engines import LabEngines
    from labkit.notebook.cluster.rank_group import LabRanks
    from labkit.notebook.cluster.rank_group import RankGroup
    from labkit.notebook.diagnostics.stacks import Stacks
    from labkit.notebook.execution.training_run import RunWatch
    from labkit.notebook.hosts.hosts import Hosts
    from labkit.notebook.keeper.attachment import Attachment
    from labkit.notebook.plots.estimate_plot import Forecast
    from labkit.notebook.plots.figure import RunFigure
    from labkit.notebook.runs.run import Run
    from labkit.notebook.tuning.crew import Place
    from labkit.notebook.tuning.study import Study

_FOR_FIRST_CELL = "labkit.notebook.execution.training_run"
"""With all that it imports, pandas above all."""
_labs: "weakref.WeakSet[Lab]" = weakref.WeakSet()


def running_labs() -> "list[Lab]":
    """The labs of this process that have not been stopped."""
    return [lab for lab in _labs if lab.is_running]


@documented(StartOptions)
class Lab:
    """A cluster of ranks in one process group, ready when it exists.

    As a context manager the lab stops at the end; otherwise call `stop`. Whatever
    happens to this process, its ranks end with it.

    Parameters
    ----------
    {options}
    on_progress : callable, optional
        Called with a line of text at each stage of the start.

    Attributes
    ----------
    runs : list of Run
        Training runs of this lab, newest last.
    studies : list of Study
        What `tune` and `%%dist_tune` have begun in this lab, newest last.
    launcher : str
        What has started the ranks: "local", "ssh", "slurm", "mpi" or, with a
        profile, its name, as in "profile:pbs".
    placements : list of Placement
        Rank, device, backend and threads of each rank, in rank order.

    Raises
    ------
    ValueError
        For a placement that is not possible on this machine; nothing has started.
    RuntimeError
        If engines do not start.

    Examples
    --------
    >>> with Lab(num_ranks=2) as lab:
    ...     lab.push(lr=0.1)
    ...     lab.run("print(rank, lr)")
    """

    _hosts: "Hosts | None" = None
    _keeper: "Attachment | None" = None
    _ranks: "LabRanks | None" = None

    def __init__(
        self,
        num_ranks: int | None = None,
        *,
        backend: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        group_timeout_s: float = timeouts.GROUP_S,
        launcher: str = "local",
        profile: str | None = None,
        hosts: str | None = None,
        nodes: int | None = None,
        launcher_options: str | None = None,
        interface: str | None = None,
        keep: float | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        # A test holds the keywords and StartOptions together.
        options = options_of(StartOptions, locals())
        self._options, self.launcher = options, options.started_by
        try:
            with interrupts.held():
                if keep is None:
                    placed = place_on_hosts(options, on_progress=on_progress)
                    self.placements, self._hosts = placed
                else:
                    from labkit.notebook.keeper.attachment import start_keeper

                    self._keeper = start_keeper(options, on_progress)
                    self.placements = self._keeper.placements
        except BaseException:
            self._give_hosts_back()
            raise
        self._open(on_progress)

    @classmethod
    def attach(
        cls,
        name: str | None = None,
        *,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> "Lab":
        """Find the ranks that a lab with `keep` has left running, as `%dist_attach`.

        It waits for the end of a cell that still runs there; an interrupt ends that
        cell. A line on stderr says if the cell has failed, or if ranks took different
        numbers of steps.

        Parameters
        ----------
        name : str, optional
            The lab's, such as "lab-4711"; by default the only one that is kept.
        on_progress : callable, optional
            Called with a line of text at each stage.

        Returns
        -------
        Lab
            With the ranks' variables, and no runs yet: those before are on disk.

        Raises
        ------
        RuntimeError
            Where there is no such lab, several are kept and none is named, or another
            kernel is attached to it; it is left as it is.
        """
        from labkit.notebook.keeper.attachment import attach

        lab = cls.__new__(cls)
        try:
            with interrupts.held():
                keeper = lab._keeper = attach(name)
                lab.launcher, lab.placements = keeper.launcher, keeper.placements
        except BaseException:
            if lab._keeper is not None:
                lab._keeper.detach()
            raise
        lab._open(on_progress, keeper.detach)
        lab._say_what_was_missed()
        return lab

    def _say_what_was_missed(self) -> None:
        """Of a cell that has ended while no kernel was there."""
        from labkit.notebook.execution.completion import end_lost_runs
        from labkit.notebook.execution.errors import unheard
        from labkit.notebook.keeper.kept_ranks import KeptRanks

        assert isinstance(self._ranks, KeptRanks)
        end_lost_runs(self._ranks.ended)
        for sentence in unheard(self._ranks.ended):
            say(sentence)
        self._ranks.received()

    def _open(
        self,
        on_progress: Callable[[str], None],
        give_up: Callable[[], str | None] | None = None,
    ) -> None:
        """Start the ranks, or find those that there are; `give_up` is called in place
        of `stop` where that fails."""
        self.runs: list[Run] = []
        """Training runs, newest last."""
        self.studies: list[Study] = []
        """Studies, newest last."""
        self._past = Past()
        _labs.add(self)

        def on_stage(text: str) -> None:
            on_progress(text)
            if text == LOADING_TORCH:
                with contextlib.suppress(Exception):  # the first cell says it
                    importlib.import_module(_FOR_FIRST_CELL)

        try:
            with interrupts.held():
                from labkit.notebook.keeper.kept_ranks import ranks_of

                self._ranks = ranks_of(
                    self._keeper or self._hosts,
                    self.placements,
                    what_is_running=self._what_is_running,
                    on_progress=on_stage,
                )
                if is_notebook():
                    render_process.painter()  # which loads matplotlib meanwhile
        except BaseException as error:
            left = (give_up or self.stop)() or "nothing is left running"
            if not isinstance(error, KeyboardInterrupt):
                raise
            from labkit.notebook.execution.errors import Interrupted

            raise Interrupted([], f"Interrupted; {left}.") from None

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self._ranks is None:
            return "<Lab: stopped>"
        return f"<Lab: {self.describe()}>"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.placements)

    @property
    def backend(self) -> str:
        """The backend of the process group, "nccl" or "gloo"."""
        return self.placements[0].backend

    @property
    def device(self) -> str:
        """The kind of the ranks' devices, "cuda" or "cpu"."""
        return self.placements[0].device.split(":")[0]

    @property
    def hosts(self) -> list[str]:
        """The hosts that the ranks are on, in order; none where it is this one."""
        return [*dict.fromkeys(each.host for each in self.placements if each.host)]

    @property
    def kept(self) -> tuple[str, float] | None:
        """The name by which `attach` finds the lab, and for how many minutes it is kept
        without a kernel; None where it ends with this process."""
        keeper = self._keeper
        return None if keeper is None else (keeper.name, keeper.keep_minutes)

    @property
    def is_running(self) -> bool:
        """Whether the lab has not been stopped."""
        return self._ranks is not None

    def describe(self) -> str:
        """Describe the lab in a few words.

        Returns
        -------
        str
            As "2 ranks on the CPU, gloo".
        """
        return in_words(self.placements)

    # ---- cells ----

    def run(
        self,
        code: str,
        ranks: Ranks = None,
        *,
        timeout: float | None = None,
        hang_after: float = timeouts.HANG_AFTER_S,
    ) -> None:
        """Run code on ranks, as `%%dist` does.

        Output appears by rank, equal output once. After an error every rank has stopped
        and keeps its variables, except one that did not stop: it is restarted.

        Parameters
        ----------
        code : str
            A cell: Python, and what IPython takes besides, such as `%run`.
        ranks : str, int or sequence of int, default all
            As "0", "0,2" or "1-3".
        timeout : float, optional
            Stop the cell after this many seconds; by default it has no limit.
        hang_after : float, default 30
            When nothing has happened for this many seconds, a note says where every
            rank stands; 0 for no note.

        Raises
        ------
        ValueError
            For arguments that are not valid; nothing has run.
        RankError
            When a rank failed or died: the first one in full, the others in a line.
        Interrupted
            On KeyboardInterrupt.
        CellTimeoutError
            After `timeout` seconds.
        """
        check_code(code)
        check_timeout("timeout", timeout)
        check_hang_after("hang_after", hang_after)
        targets = parse_ranks(ranks, self.world_size)
        with self._working() as cluster:
            from labkit.notebook.execution.cell_execution import CellExecution
            from labkit.notebook.execution.completion import run_to_completion

            execution = CellExecution(
                cluster,
                code if code.strip() else "pass",
                CellSpec(execution_count(), directory=working_directory()),
                targets,
                hang_after_s=hang_after,
            )
            is_everywhere = len(targets) == self.world_size
            self._past.note_cell(code, None if is_everywhere else targets)
            run_to_completion(execution, self._running(), timeout)

    @documented(RunOptions)
    def train(
        self,
        strategy: str,
        code_or_function: str | Callable[..., Any],
        *,
        name: str | None = None,
        seed: int = 0,
        accumulate: int = 1,
        clip: float | None = None,
        precision: str = "fp32",
        activation_checkpointing: bool = False,
        sync_batchnorm: bool = False,
        compile: bool = False,
        mesh: str | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        comm: str | None = None,
        average_every: int | None = None,
        average_after: int | None = None,
        servers: int = 1,
        asynchronous: bool = False,
        staleness: int | None = None,
        slow: str | None = None,
        profile: bool | int | str | None = None,
        config: Mapping[str, Any] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        keep: int | None = None,
        resume: bool = False,
        elastic: bool = False,
        timeout: float | None = None,
        hang_after: float = timeouts.HANG_AFTER_S,
        live: bool | str = True,
        log_scale: bool = False,
        background: bool = False,
    ) -> "Run":
        """Run a training cell, or function, under a strategy, as `%%dist_train` does.

        With `live=False` nothing is plotted. With `background=True` the run that is
        returned has only begun: see `Run.wait` and `Run.stop`.

        Parameters
        ----------
        strategy : str
            As "ddp" or "fsdp"; an unknown one gets the list of those that exist.
        code_or_function : str or callable
            A cell's code, or a function, which is called as `f()` or
            `f(rank, world_size)`, as its signature says.
        {options}

        Returns
        -------
        Run
            Also the last of `runs`; after an error you find it there.

        Raises
        ------
        ValueError
            For arguments that are not valid; nothing has run.
        RankError, Interrupted, CellTimeoutError
            As `run` does.

        Examples
        --------
        >>> run = lab.train("fsdp", code, precision="bf16", clip=1.0)
        >>> run.summary()
        """
        config = {} if config is None else config
        options = options_of(RunOptions, locals())  # a test holds these together, too
        return self._train(strategy, code_or_function, options)

    def _train(
        self,
        strategy: str,
        code_or_function: str | Callable[..., Any] | ScriptSpec,
        options: RunOptions,
        watch: "RunWatch | None" = None,
        group: "RankGroup | None" = None,
    ) -> "Run":
        """`train` on the ranks of `group`, by default all; `watch` looks at the run
        meanwhile."""
        from labkit.notebook.execution.training_run import RunWatch
        from labkit.notebook.execution.training_run import Training
        from labkit.notebook.execution.training_run import TrainRequest
        from labkit.notebook.execution.training_run import free_name
        from labkit.notebook.kernel.background import Job
        from labkit.notebook.live.widget_view import find_view
        from labkit.strategies import find_strategy

        group = self._running() if group is None else group
        technique = find_strategy(strategy)
        check_options(
            technique, options, device=self.device, world_size=len(group.everyone)
        )
        plan = plan_checkpoints(options)
        if not (callable(code_or_function) or isinstance(code_or_function, ScriptSpec)):
            check_code(code_or_function)
        # In a terminal a line that is rewritten would fight with the next prompt.
        is_shown = is_notebook() or not options.background
        view = find_view(options.live) if is_shown else None
        request = TrainRequest(
            technique, code_or_function, options, plan, view, watch or RunWatch()
        )
        name = free_name(options.name, [run.name for run in self.runs])
        training = Training(request, name, group)
        self._wait_for_the_last_run()
        with contextlib.ExitStack() as work:
            work.enter_context(group.working())
            folder = None if plan is None else Path(plan.directory)
            work.enter_context(alone_in(folder))
            run = training.begin(on_run=self.runs.append)
            some = group.in_lab if len(group.in_lab) < self.world_size else None
            run.before = self._past.note_run(code_or_function, strategy, some)
            held = work.pop_all()

        def finish() -> None:
            with held:
                training.finish()

        if options.background:
            run.job = Job(finish, name=f"labkit {run.name}")
        else:
            finish()
        return run

    @documented(RunOptions)
    def import_script(
        self,
        script: str | os.PathLike[str],
        arguments: Sequence[object] = (),
        *,
        module: bool = False,
        name: str | None = None,
        seed: int = 0,
        slow: str | None = None,
        profile: bool | int | str | None = None,
        timeout: float | None = None,
        hang_after: float = timeouts.HANG_AFTER_S,
        live: bool | str = True,
        log_scale: bool = False,
        background: bool = False,
    ) -> "Run":
        """Run a script for `torchrun` on the warm ranks, unchanged: `%dist_import`.

        On every rank the file runs as `__main__`, with the environment, arguments and
        settings that it has under `torchrun`. Losses are noticed as in a raw cell. The
        lab has its variables, modules, settings and process group back afterwards;
        none of the script's variables is kept.

        Parameters
        ----------
        script : str or path
            The script's file, or with `module` a module's name.
        arguments : sequence of str or number, optional
            The script's own, for its `sys.argv`.
        module : bool, default False
            Run a module, as `python -m` does.
        {name}
        seed : int, default 0
            For a script that sets no seed: a rank begins with `seed` + its rank.
        {slow}
        {profile}
        {timeout}
        {hang_after}
        {live}
        {log_scale}
        {background}

        Returns
        -------
        Run
            As from `train`, with the script's text as its `code`.

        Raises
        ------
        ValueError
            For a file that is no script, and arguments that are not valid; nothing
            has run.
        RankError, Interrupted, CellTimeoutError
            As `run` does. A script that calls `sys.exit` with another code than 0 has
            failed.

        Examples
        --------
        >>> run = lab.import_script("train.py", ["--epochs", 2])
        """
        given = dict(locals())
        options = {each: given[each] for each in OF_SCRIPT_RUNS}
        from labkit.notebook.execution.script_file import read_script

        found = read_script(script, arguments, module=module)
        return self._train("raw", found, RunOptions(**options))

    @documented(TuneOptions)
    def tune(
        self,
        code_or_function: str | Callable[..., Any],
        space: Mapping[str, Any],
        *,
        strategy: str = "ddp",
        trials: int | None = None,
        seconds: float | None = None,
        metric: str = "loss",
        mode: str | None = None,
        sampler: Any = "tpe",
        pruner: Any = "hyperband",
        ranks_per_trial: int | None = None,
        name: str | None = None,
        seed: int = 0,
        resume: bool = False,
        fits: Callable[..., Any] | None = None,
        live: bool = True,
        **run_options: Any,
    ) -> "Study":
        """Find the best parameters by training runs on the warm ranks.

        Trials run on all ranks, one after the other, or with `ranks_per_trial` at once,
        each on a group of ranks in which they are counted from 0.

        A trial that falls behind is stopped after the same step on every rank. One
        that fails, or in which a rank dies, is a failed trial: dead ranks are
        restarted, and the study goes on, unless its first three trials have all
        failed. An interrupt ends it with what it has. All of it is on disk: after the
        death of the kernel too `resume=True` goes on.

        Parameters
        ----------
        code_or_function : str or callable
            As for `train`. A function takes the parameters by name, a cell has them
            as variables.
        space : mapping of str to tuple, list or distribution
            Parameters and their ranges: `(low, high)`, `(low, high, "log")` or
            `(low, high, step)`, whole numbers where low and high are; a list of
            choices; or a distribution of Optuna's. A parameter called "strategy" is
            the strategy of the run.
        strategy : str, default ddp
            As for `train`.
        {options}
        fits : callable, optional
            Takes parameters of the space by name and returns the plain model, or
            (model, x) with a batch of its input: trials that `estimate` predicts not
            to fit, at a `batch_size` of the space if it has one, are skipped.
        live : bool, default True
            Show one picture of all trials while it runs.
        **run_options
            For every run, as for `train`: precision, timeout, and so on. With
            `checkpoint` each trial has a folder in it, `<study>/trial-<number>`, and
            the best one's stays.

        Returns
        -------
        Study
            With `best_params`, `best_value`, `best_run`, `table` and `plot()`. Also
            the last of `studies`; after an error you find it there.

        Raises
        ------
        ValueError
            For arguments that are not valid.
        RankError, CellTimeoutError
            The first error, where the first three trials have failed.

        Examples
        --------
        >>> study = lab.tune(train, {"lr": (1e-4, 1e-1, "log"), "width": [32, 64]})
        >>> study.best_params
        """
        options = options_of(TuneOptions, locals())  # and these
        from labkit.notebook.tuning.crew import StudyRanks
        from labkit.notebook.tuning.tuner import Tuner
        from labkit.notebook.tuning.tuner import TuneRequest

        request = TuneRequest(
            code_or_function, space, strategy, options, run_options, live, fits
        )
        ranks = StudyRanks(self.world_size, self.device, self._divided, self.estimate)
        tuner = Tuner(request, ranks)
        self.studies.append(tuner.study)
        return tuner.run()

    @contextlib.contextmanager
    def _divided(self, num_ranks: int) -> "Iterator[list[Place]]":
        """Groups of so many ranks for the trials of a study; all ranks in one."""
        from labkit.notebook.tuning.crew import Place

        if num_ranks == self.world_size:
            yield [Place(format_ranks(range(num_ranks)), self._train, self.restart)]
            return
        self._wait_for_the_last_run()
        with self._running().divided(num_ranks) as groups:
            yield [
                Place(
                    format_ranks(each.in_lab),
                    partial(self._train, group=each),
                    each.restart,
                )
                for each in groups
            ]

    def find_runs(self, names: Sequence[str] = ()) -> "list[Run]":
        """Find runs by name.

        Parameters
        ----------
        names : sequence of str, default all runs of this lab
            A run that is not of this lab is loaded from disk, by `labkit.load_run`.

        Returns
        -------
        list of Run
            In the order of `names`.

        Raises
        ------
        ValueError
            Where there is no such run.
        """
        from labkit.notebook.runs.catalog import find_runs

        return find_runs(names, own=self.runs) if names else list(self.runs)

    def export(
        self,
        path: str | os.PathLike[str],
        run: str | None = None,
        *,
        style: str | None = None,
        force: bool = False,
    ) -> list[str]:
        """Write a run, with the cells that it needs, as a script for `torchrun`.

        Parameters
        ----------
        path : str or path
            The script's file.
        run : str, optional
            The run's name; by default the newest of this lab.
        style : {"plain", "labkit"}, optional
            As for `Run.export`.
        force : bool, default False
            Replace a file that is there.

        Returns
        -------
        list of str
            What there is to know of the script, in sentences.

        Raises
        ------
        ValueError
            As `Run.export`, and where there is no such run.
        """
        if run is None and not self.runs:
            raise ValueError("there is no run to export; %%dist_train makes one")
        [found] = self.runs[-1:] if run is None else self.find_runs([run])
        return found.export(path, style=style, force=force)

    def compare(self, *names: str) -> "pd.DataFrame":
        """Compare runs in one table.

        Parameters
        ----------
        *names : str
            As in `find_runs`; all runs of this lab by default.

        Returns
        -------
        DataFrame
            By run name: strategy, ranks, state, steps, last loss, steps/s, seconds,
            bytes of memory by component on the rank that has most, and bytes and
            seconds of the collectives of a step.

        Raises
        ------
        ValueError
            Where there is no such run.
        """
        from labkit.notebook.runs.comparison import compare_runs

        return compare_runs(self.find_runs(names))

    def plot_runs(self, *names: str) -> "RunFigure":
        """Overlay runs in one figure: loss, memory by component, steps/s, bytes sent.

        Parameters
        ----------
        *names : str
            As in `find_runs`; all runs of this lab by default.

        Returns
        -------
        RunFigure
            A matplotlib Figure that displays itself.

        Raises
        ------
        ValueError
            Where there is no such run.
        """
        from labkit.notebook.runs.comparison import plot_comparison

        return plot_comparison(self.find_runs(names))

    def push(self, ranks: Ranks = None, /, **values: Any) -> None:
        """Copy values to variables on ranks.

        Functions and classes of the notebook go with all that they refer to, as it is
        then: when that changes, push them again. A large copy shows a bar; it has no
        time limit while the ranks answer.

        Parameters
        ----------
        ranks : str, int or sequence of int, default all
            As "0", "0,2" or "1-3".
        **values
            The variables, by the names that they get.

        Raises
        ------
        ValueError
            For a name or a value that ranks cannot have; none is changed.

        Examples
        --------
        >>> lab.push(lr=0.1, batch_size=64)
        >>> lab.push("0,1", lr=0.2)
        """
        for name in values:
            check_pushed_name(name)
        if ranks is not None and not values:
            raise ValueError(
                f"push got {short_repr(ranks)} and no variable; give each by its name, "
                "for example lab.push(x=x)"
            )
        targets = parse_ranks(ranks, self.world_size)
        payload = serialization.pickled_by_name(
            values, "make it on the ranks instead, in a %%dist cell"
        )
        with self._working() as cluster:
            if any(callable(value) for value in values.values()):
                transfer.push_sources(cluster, cell_sources(), targets)
            transfer.push(cluster, payload, targets)
        self._past.note_pushed(values)

    def pull(self, name: str, ranks: Ranks = 0, *, full: bool = False) -> Any:
        """Copy a variable from ranks to the notebook.

        Tensors come to the CPU. A large copy shows a bar. Where a rank is dead,
        variables of the others can still be copied, except with `full`.

        Parameters
        ----------
        name : str
            The variable's.
        ranks : str, int or sequence of int, default 0
            As "0", "0,2", "1-3" or "all".
        full : bool, default False
            Gather what is sharded: a model gives its whole state dict, loadable in the
            plain model; a DTensor the whole tensor.

        Returns
        -------
        object
            The value on one rank; for several ranks a list of them, in rank order.

        Raises
        ------
        NameError
            Where one of the ranks has no such variable.
        ValueError
            For arguments that are not valid, and a value that cannot be copied.
        """
        if not isinstance(name, str):
            raise ValueError(f"pull takes a variable's name; found {short_repr(name)}")
        check_flag("full", full)
        targets = parse_ranks(ranks, self.world_size)
        with self._working(None if full else targets):
            found = transfer.pull(self._running(), name, targets, full=full)
        values = list(map(serialization.loads, found))
        return values[0] if isinstance(ranks, int) or len(targets) == 1 else values

    @documented(RunOptions)
    def estimate(
        self,
        model: Any,
        x: Any = None,
        *,
        batch_size: int | None = None,
        sequence: int | None = None,
        optimizer: Any = None,
        world_sizes: Sequence[int] | None = None,
        precision: str = "fp32",
        accumulate: int = 1,
        activation_checkpointing: bool = False,
        device_bytes: float | None = None,
    ) -> "Forecast":
        """Predict the memory of a rank under every strategy; nothing is trained.

        Parameters
        ----------
        model : nn.Module or str
            The plain module, also on the meta device. A string names a variable of
            rank 0; `x` is then a name there too, and `optimizer` may be one.
        x : Tensor, tuple or dict of Tensor, or str, optional
            A batch of the model's input: its first dimension is the batch. By default
            token ids of shape (batch, `sequence`), or rows of numbers, as the model
            begins; where that is not known, the forecast is without activations and
            says which argument adds them.
        batch_size : int, optional
            Samples of a global batch; by default those of `x`.
        sequence : int, optional
            Tokens of a sample, for a model that begins with an embedding.
        optimizer : Optimizer, type or str, default AdamW
            One whose class and defaults are taken, a class, or the name of a class of
            torch.optim.
        world_sizes : sequence of int, optional
            By default this lab's.
        {precision}
        {accumulate}
        {activation_checkpointing}
        device_bytes : float, optional
            Memory of a rank's device, in bytes. By default what it has; ranks on the
            CPU share the host's.

        Returns
        -------
        Forecast
            `table` has bytes by (world size, strategy) and component, `sentence` says
            what fits; it displays itself as a picture and a table.

        Raises
        ------
        ValueError
            For what cannot be estimated.
        NameError
            Where rank 0 has no variable of that name.
        """
        from labkit.notebook.plots.estimate_plot import Forecast

        if device_bytes is None:
            from labkit.notebook.diagnostics.status import device_bytes_of

            device_bytes = device_bytes_of(self._running())
        options: dict[str, Any] = {
            "world_sizes": [self.world_size] if world_sizes is None else world_sizes,
            "device_bytes": device_bytes,
            "device": self.device,
            "batch_size": batch_size,
            "sequence": sequence,
            "precision": precision,
            "accumulate": accumulate,
            "activation_checkpointing": activation_checkpointing,
        }
        if isinstance(model, str):
            if not isinstance(x, str | None):
                raise ValueError(
                    f"model {short_repr(model)} is a variable of rank 0, so x names "
                    f"one there too; found {short_repr(x)}"
                )
            with self._working() as cluster:
                found = transfer.forecast(cluster, model, x, optimizer, options)
            table, sentence = found
        else:
            from labkit.estimate import forecast

            table, sentence = forecast(model, x, optimizer=optimizer, **options)
        return Forecast(table, sentence, device_bytes)

    def status(self) -> "pd.DataFrame":
        """Ask every rank for its status, also while a cell runs.

        Returns
        -------
        DataFrame
            One row per rank: host, pid, device, state, memory used and total (bytes),
            last run and its step; and a column `cause` where a rank is dead or cannot
            be reached.
        """
        from labkit.notebook.diagnostics.status import status_table

        group = self._running()
        if not self.runs:
            return status_table(group, None, {})
        run = self.runs[-1]
        steps = {run.in_lab[rank]: n for rank, n in run.collector.steps.items()}
        return status_table(group, run.name, steps)

    def stack(self, *, full: bool = False) -> "Stacks":
        """Ask every rank where it is, also while a cell runs.

        Parameters
        ----------
        full : bool, default False
            Show the frames of libraries too, and other threads.

        Returns
        -------
        Stacks
            The Python stack of each rank and the collective that it waits in; and
            where ranks wait for each other in different collectives.
        """
        from labkit.notebook.diagnostics.stacks import StackRequest

        cluster = self._running().cluster
        return StackRequest(cluster, range(self.world_size), is_full=full).wait()

    def has_variable(self, name: str) -> bool:
        """Whether rank 0 has a variable, also while a cell runs.

        Parameters
        ----------
        name : str
            What a cell with `%%dist` calls it.

        Returns
        -------
        bool
            False as well where rank 0 does not answer within a second.
        """
        return bool(self._asked(0, "has_variable", name=name))

    def complete(self, code: str, rank: int = 0) -> tuple[int, list[tuple[str, str]]]:
        """Find how a cell that is being written may go on, by the variables of a rank.

        Parameters
        ----------
        code : str
            The cell up to the cursor, without its magic.
        rank : int, default 0
            The rank whose variables they are.

        Returns
        -------
        start : int
            Where what is completed begins.
        words : list of (str, str)
            What may stand from there to the end, each with its type, such as
            "function"; none where the rank does not answer within a second.
        """
        found = self._asked(rank, "complete", code=code)
        if found is None:
            return len(code), []
        return found["start"], [(text, kind) for text, kind in found["words"]]

    def help_of(self, name: str, *, with_source: bool = False) -> str:
        """Describe a variable of rank 0, also while a cell runs.

        Parameters
        ----------
        name : str
            What a cell with `%%dist` calls it, such as "model.forward".
        with_source : bool, default False
            Whether its source is part of it.

        Returns
        -------
        str
            What IPython shows for `name?` of a function or a class; of all else, as of
            a model, its type alone; "" where rank 0 has no such variable, or does not
            answer within a second.
        """
        return self._asked(0, "help_of", name=name, with_source=with_source) or ""

    def _asked(self, rank: int, question: str, **arguments: Any) -> Any:
        """What a rank answers, also while it runs a cell; None where it does not."""
        answer = self._running().cluster.ask(rank, question, **arguments)
        try:
            return answer.result(timeouts.ASK_S)
        except (TimeoutError, CancelledError, RuntimeError):
            return None

    def restart(
        self,
        *,
        everyone: bool = False,
        num_ranks: int | None = None,
        hosts: str | None = None,
    ) -> list[int]:
        """Restart dead ranks, or all of them, and re-create the process group.

        A restarted rank has the same rank and device as before; the others keep their
        variables. With `num_ranks` or `hosts` the lab gets another number of ranks, or
        other hosts: a rank of the same number on the same host keeps its variables.

        Parameters
        ----------
        everyone : bool, default False
            Restart every rank, and ipyparallel's controller; all variables are lost.
            What was interrupted in this goes on with the next restart of any kind.
        num_ranks : int, optional
            The new number of ranks.
        hosts : str, optional
            As for `Lab(launcher="ssh")`: the hosts, in order of rank, and how many
            ranks each is to have.

        Returns
        -------
        list of int
            The ranks that were started.

        Raises
        ------
        ValueError
            If the number of ranks or the hosts are not possible; nothing has changed.
        RuntimeError
            If a cell is running, or the ranks do not start.
        """
        self._wait_for_the_last_run()
        ranks = self._running()
        if num_ranks is not None or hosts is not None:
            if everyone:
                raise ValueError(
                    "--all restarts the ranks that there are; leave it out with -n or "
                    "--hosts, which change their number or their places"
                )
            try:
                return ranks.change(
                    lambda: place_anew(
                        self._options,
                        ranks.placements,
                        ranks.hosts,
                        num_ranks=num_ranks,
                        on_hosts=hosts,
                    )
                )
            finally:
                self.placements, self._hosts = [*ranks.placements], ranks.hosts
        if not (everyone or ranks.cluster.is_ended):
            return ranks.restart()
        self._past = Past()
        return ranks.restart_all()

    def check(self) -> None:
        """Check that every rank answers and that an all-reduce is right.

        A process group that is broken is re-created first.

        Raises
        ------
        RuntimeError
            If a rank is dead or does not answer, or a cell is running.
        """
        self._wait_for_the_last_run()
        self._running().check()

    def stop(self) -> None:
        """End every process that this lab started; does nothing the second time."""
        with interrupts.held():
            for run in self.runs:
                run.interrupt(timeout=timeouts.END_RUN_S)
            ranks, self._ranks = self._ranks, None
            try:
                if ranks is not None:
                    ranks.stop()
            finally:
                self._give_hosts_back()
            for run in self.runs:
                if run.job is not None:
                    run.job.join(timeouts.END_RUN_S)
            render_process.close()

    def _give_hosts_back(self) -> None:
        if self._hosts is not None:
            self._hosts.launcher.close()
        if self._keeper is not None:
            self._keeper.close()

    # ---- one cell ----

    def _running(self) -> "LabRanks":
        if self._ranks is None:
            raise UserError("the lab is stopped; %dist_start, or Lab(), starts another")
        return self._ranks

    @contextlib.contextmanager
    def _working(self, alone: Sequence[int] | None = None) -> "Iterator[LabEngines]":
        """The cluster, all of its ranks alive and in one group, for one cell; or what
        ranks `alone` need."""
        self._wait_for_the_last_run()
        ranks = self._running()
        with ranks.working(alone):
            yield ranks.cluster

    def _wait_for_the_last_run(self) -> None:
        """A run that has ended in the background still restores the group."""
        for run in self.runs[-1:]:
            if run.job is not None and run.state != "running":
                run.job.join()

    def _what_is_running(self) -> str:
        run = self.runs[-1] if self.runs else None
        if run is None or run.job is None or run.state != "running":
            return "the lab is running another cell; wait for it, or stop it"
        return (
            f"{run.name} is running in the background: %dist_show {run.name} shows it; "
            "stop() of its Run ends it, and wait() waits for its end, as in `import "
            "labkit; labkit.current_lab().runs[-1].stop()`, or lab.runs[-1].stop() "
            "where you have made a Lab"
        )
