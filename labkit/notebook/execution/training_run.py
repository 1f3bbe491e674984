"""One training run on a lab's ranks: starts it, shows it, waits for its end."""

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from labkit import serialization
from labkit import timeouts
from labkit.notebook.cluster.rank_group import RankGroup
from labkit.notebook.execution.cell_execution import CellExecution
from labkit.notebook.execution.cell_execution import CellListener
from labkit.notebook.execution.completion import Wait
from labkit.notebook.execution.completion import run_to_completion
from labkit.notebook.execution.elastic import Elastic
from labkit.notebook.execution.options import RunOptions
from labkit.notebook.execution.options import first_step_of
from labkit.notebook.history.collector import Collector
from labkit.notebook.history.consistency import NO_LONGER_ONE
from labkit.notebook.kernel.output import execution_count
from labkit.notebook.kernel.output import is_notebook
from labkit.notebook.kernel.output import say
from labkit.notebook.kernel.output import working_directory
from labkit.notebook.kernel.pickled_function import Packed
from labkit.notebook.kernel.pickled_function import pack_function
from labkit.notebook.kernel.pickled_function import source_of
from labkit.notebook.live.live_view import LiveView
from labkit.notebook.runs import persistence
from labkit.notebook.runs.run import Run
from labkit.records import FUNCTION_NAME
from labkit.records import PROFILE_FOLDER
from labkit.records import SERVE_NAME
from labkit.records import Batch
from labkit.records import CellSpec
from labkit.records import CheckpointPlan
from labkit.records import Placement
from labkit.records import ScriptSpec
from labkit.strategies import Strategy

INTERVAL_S = 0.5
"""Between writes of what ranks report; a short run is written as it begins and ends."""

_CALLS = "labkit.rank.engine.rpc"


class RunWatch:
    """What looks at a run while it is under way, and may stop it; this one does not."""

    label = ""
    """What tells the run's output from that of another at the same time."""

    def begin(self, run: Run, execution: CellExecution) -> None:
        """The run is about to begin."""

    def tick(self) -> None:
        """Called at every turn of the wait for its end."""

    def before_output(self) -> None:
        """Something is about to be printed."""

    def take_note(self, sentence: str) -> None:
        """A sentence about the run, which has ended."""
        say(sentence)


@dataclass(frozen=True)
class TrainRequest:
    """The arguments of a training run, checked."""

    strategy: Strategy
    work: str | Callable[..., Any] | ScriptSpec
    """A cell's code, a function, or a script."""
    options: RunOptions
    checkpoints: CheckpointPlan | None
    view: type[LiveView] | None
    watch: RunWatch = field(default_factory=RunWatch)


class RunListener(CellListener):
    """Adds to a run what its ranks send, and keeps its view up to date."""

    def __init__(self, run: Run, view: LiveView | None, watch: RunWatch) -> None:
        self._run = run
        self._view = view
        self._watch = watch
        self._is_to_save = False
        self._next_save = time.monotonic() + INTERVAL_S
        self.label = watch.label
        self.may_clear = view is None and not watch.label

    def take_batch(self, rank: int, batch: Batch) -> None:
        self._run.collector.add(rank, batch)

    def take_report(self, rank: int, report: Any) -> None:
        self._run.collector.add_report(rank, report)
        self._is_to_save = True

    def tick(self) -> None:
        if self._is_to_save and time.monotonic() >= self._next_save:
            self._is_to_save = False
            self._next_save = time.monotonic() + INTERVAL_S
            persistence.save(self._run)
        if self._view:
            self._view.tick()
        self._watch.tick()

    def before_question(self) -> None:
        if self._view:
            self._view.catch_up()
        self.before_output()

    def before_output(self) -> None:
        self._watch.before_output()
        if self._view:
            self._view.clear_line()


class Training:
    """A run on the ranks of `group`, while it is under way."""

    def __init__(self, request: TrainRequest, name: str, group: RankGroup) -> None:
        """Nothing is sent yet. Raises ValueError for what cannot be."""
        self._request = replace(request, options=on_hosts(request, group.placements))
        self._given_mesh = request.options.mesh
        self._name = name
        self._group = group
        everyone = list(group.everyone)
        self._targets = [0] if request.strategy.is_single else everyone
        num_servers = request.options.servers
        self._servers = request.strategy.server_ranks(num_servers, len(self._targets))
        config = dict(request.options.config)
        self._config = serialization.dumps(config) if config else b""
        self._said_of_job: list[str] = []
        self._function: Packed | None = None
        self._script: ScriptSpec | None = None
        if isinstance(request.work, ScriptSpec):
            self._script = replace(request.work, seed=request.options.seed)
            self._code = f"{FUNCTION_NAME}()"
            self._source = request.work.source
        elif callable(request.work):
            self._function = pack_function(request.work)
            self._code = f"{FUNCTION_NAME}()"
            self._source = source_of(request.work)
        else:
            self._code = request.work if request.work.strip() else "pass"
            self._source = request.work
        self._first_step = first_step_of(request.checkpoints)
        if request.checkpoints is not None:
            self._check_shared("checkpoint", Path(request.checkpoints.directory))
        if request.options.profile:
            self._check_shared("profile", persistence.runs_folder())

    def _check_shared(self, option: str, folder: Path) -> None:
        """ValueError unless all hosts that write into a folder share it."""
        there = next(each for each in (folder, *folder.parents) if each.exists())
        try:
            without = self._group.cluster.hosts_without(there)
        except OSError as error:
            raise ValueError(
                f"--{option}: {there} cannot be written to: {error}"
            ) from None
        if without:
            how = "name one" if option == "checkpoint" else "LABKIT_RUNS names one"
            raise ValueError(
                f"--{option}: {there} is not the same folder on {', '.join(without)}, "
                f"and every host writes into it; {how} on a file system that all share"
            )

    def begin(self, on_run: Callable[[Run], None]) -> Run:
        """Give the ranks all but the cell; the run. `on_run` gets it as soon as it is
        on disk."""
        request = self._request
        self._send_work()
        workers = [rank for rank in self._targets if rank not in self._servers]
        collector = Collector(workers, self._first_step or 0, servers=self._servers)
        strategy = request.strategy.name
        options = request.options
        self.run = Run(
            self._name,
            strategy,
            self._source,
            collector,
            options.of_the_step,
            log_scale=options.log_scale,
        )
        self.run.in_lab = self._group.in_lab
        placements = self._group.placements
        persistence.begin(
            self.run,
            seed=options.seed,
            devices=[placements[rank].device for rank in self._targets],
            ranks_per_host=ranks_per_host([placements[r] for r in self._targets]),
            backend=placements[0].backend,
            config=options.config,
            checkpoints=request.checkpoints,
            resumed_from=self._first_step,
            pids=list(self._group.cluster.pids.values()),
            command=self._script.command if self._script else None,
        )
        on_run(self.run)
        self._view = request.view(self.run) if request.view else None
        self._spec = self._cell_spec()
        self._execution = self.run.execution = self._make_execution()
        request.watch.begin(self.run, self._execution)
        self._say_where_it_begins()
        return self.run

    def finish(self) -> None:
        """Run the cell to its end on every rank; raises as `Lab.run` does."""
        try:
            with self._within_job():
                run_to_completion(
                    self._execution,
                    self._group,
                    self._request.options.timeout,
                    run=self.run,
                    wait=self._wait(),
                )
        finally:
            if self._view:
                self._view.close()
            # The lab keeps its runs, and not the view of each, with a picture in it.
            self.run.execution = None
            # Of a run that failed, what was about to be equal is not.
            is_whole = self.run.state == "finished"
            mismatches = self.run.mismatches
            differ = [s for s in mismatches if is_whole or s.endswith(NO_LONGER_ONE)]
            for sentence in [*self.run.notes, *differ, *self._said_of_job]:
                self._request.watch.take_note(sentence)
            if self.run.has_profile:
                show_profile(self.run)

    @contextlib.contextmanager
    def _within_job(self) -> Iterator[None]:
        """Stop a run that keeps checkpoints in time, where its hosts are taken back at
        the end of a Slurm job."""
        cluster, plan = self._group.cluster, self._request.checkpoints
        known = None if plan is None else cluster.ends_at
        if plan is None or known is None:
            yield
            return
        ends_at = known
        if ends_at - time.time() < timeouts.JOB_END_S:
            self._said_of_job = [
                f"{self._name} began less than {timeouts.JOB_END_S:g} s before the "
                "Slurm job of these hosts ends, so it cannot be stopped in time; "
                "--resume continues from its last checkpoint"
            ]
            yield
            return
        is_over, asked_at = threading.Event(), 0.0

        def watch() -> None:
            nonlocal ends_at, asked_at
            # Somebody may change the time limit meanwhile.
            while (left_s := ends_at - timeouts.JOB_END_S - time.time()) > 0:
                if is_over.wait(min(left_s, timeouts.JOB_END_S)):
                    return
                ends_at = cluster.ends_at or ends_at
            asked_at = time.time()
            try:
                self._execution.stop_at_a_step()
            except RuntimeError:  # a rank does not answer
                self._execution.interrupt()

        thread = threading.Thread(target=watch, name="labkit-job-end", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            if asked_at and self.run.state != "finished":
                self._said_of_job = self._job_ended(ends_at, plan, asked_at)

    def _job_ended(self, ends_at: float, plan: CheckpointPlan, at: float) -> list[str]:
        clock = time.strftime("%H:%M:%S", time.localtime(ends_at))
        if self._execution.is_stopping and self.run.state == "interrupted":
            return [
                f"{self._name} was stopped after a step, {ends_at - at:.0f} s before "
                f"the Slurm job of these hosts ends (at {clock}); its checkpoint is in "
                f"{plan.directory}. To continue, start a lab in another job and run "
                "the cell with --resume"
            ]
        return [
            f"{self._name} did not reach the end of a step before the Slurm job of "
            f"these hosts ended (at {clock}); --resume continues from the last "
            f"checkpoint in {plan.directory}"
        ]

    def _send_work(self) -> None:
        # A function may refer to much, and what it refers to may run code.
        call = partial(self._group.cluster.call, ranks=self._targets, timeout_s=None)
        if self._function is not None:
            call(f"{_CALLS}:receive_function", *self._function)
        if self._script is not None:
            call(f"{_CALLS}:receive_script", asdict(self._script))
        if self._config:
            call(f"{_CALLS}:receive_config", self._config)

    def _cell_spec(self) -> CellSpec:
        request, folder = self._request, self._folder_on_ranks()
        plan = request.checkpoints
        return CellSpec(
            execution_count(),
            strategy=request.strategy.name,
            seed=request.options.seed,
            options=request.options.for_message(),
            has_config=bool(self._config),
            folder=None if folder is None else str(folder),
            profiles=None if folder is None else str(folder / PROFILE_FOLDER),
            checkpoints=asdict(plan) if plan else None,
            directory=working_directory(),
        )

    def _make_execution(self) -> CellExecution:
        return CellExecution(
            self._group.cluster,
            self._code,
            self._spec,
            self._targets,
            listener=RunListener(self.run, self._view, self._request.watch),
            hang_after_s=self._request.options.hang_after,
            other_codes=dict.fromkeys(self._servers, f"{SERVE_NAME}()"),
        )

    def _wait(self) -> Wait:
        plan = self._request.checkpoints
        if not self._request.options.elastic:
            return self._execution.wait
        assert plan is not None
        again = Elastic(self.run, self._group, self._spec, plan, self._send_work)
        return partial(again.wait, self._execution)

    def _folder_on_ranks(self) -> Path | None:
        """The run's folder, where ranks can write to it: all hosts share it."""
        folder = self.run.folder
        if folder is None:
            return None
        try:
            without = self._group.cluster.hosts_without(folder)
        except OSError as error:
            without = [f"(it cannot be written to: {error})"]
        if not without:
            return folder
        persistence.warn_once(
            folder.parent,
            f"{folder.parent} is not the same folder on {', '.join(without)}: what a "
            "rank logs is not on disk until it is sent, and lost where the rank dies "
            "before. LABKIT_RUNS may name a folder that all hosts share",
        )
        return None

    def _say_where_it_begins(self) -> None:
        mesh = self._request.options.mesh
        if mesh != self._given_mesh:
            say(f"{self._name}: --mesh {mesh}, the default on these hosts")
        plan = self._request.checkpoints
        if plan is None or not self._request.options.resume:
            return
        if self._first_step is None:
            where = f"no checkpoint in {plan.directory} yet, so it begins at step 0"
        else:
            where = f"resumed from step {self._first_step}"
        print(f"{self._name}: {where}")


def on_hosts(request: TrainRequest, placements: Sequence[Placement]) -> RunOptions:
    """The options of a run, with the mesh that suits the hosts of its ranks if the user
    gives none."""
    options = request.options
    if options.mesh is not None:
        return options
    mesh = request.strategy.mesh_on_hosts(ranks_per_host(placements))
    return replace(options, mesh=mesh)


def ranks_per_host(placements: Sequence[Placement]) -> list[int]:
    """The number of ranks on each host, in order."""
    return [*Counter(each.host for each in placements).values()]


def show_profile(run: Run) -> None:
    """Under the cell: why steps are slow, in words and as a picture."""
    try:
        profile = run.profile
        text = repr(profile)
    except (ValueError, MemoryError) as error:
        say(f"the profile of {run.name} cannot be shown: {error}")
        return
    if is_notebook():
        from IPython.display import display

        display(profile)
    else:
        print(text)


def free_name(name: str | None, taken: Sequence[str]) -> str:
    """A run's name, which none of those that are `taken` is; with a number where `name`
    is, and "run-N" where none is given."""
    if name is None:
        number = len(taken) + 1
        while f"run-{number}" in taken:
            number += 1
        return f"run-{number}"
    names = (f"{name}-{number}" for number in itertools.count(2))
    return name if name not in taken else next(n for n in names if n not in taken)
