"""Runs a study: trials on ranks that are warm, one after the other or at once."""

import contextlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from labkit.checks import UserError
from labkit.checks import absolute
from labkit.checks import check_flag
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.execution.errors import RankError
from labkit.notebook.execution.errors import in_one_line
from labkit.notebook.execution.options import RunOptions
from labkit.notebook.execution.options import check_options
from labkit.notebook.kernel.background import show_error
from labkit.notebook.kernel.output import say
from labkit.notebook.runs.progress import duration
from labkit.notebook.runs.run import Run
from labkit.notebook.trials.space import check_fits
from labkit.notebook.trials.space import check_grid
from labkit.notebook.trials.space import check_strategies
from labkit.notebook.trials.space import distributions_of
from labkit.notebook.trials.space import load_optuna
from labkit.notebook.trials.space import why_not
from labkit.notebook.trials.watch import TrialWatch
from labkit.notebook.trials.work import CHECKPOINT
from labkit.notebook.trials.work import OWN_FOLDER
from labkit.notebook.trials.work import Work
from labkit.notebook.trials.work import check_work
from labkit.notebook.trials.work import with_values
from labkit.notebook.tuning import storage
from labkit.notebook.tuning.crew import Place
from labkit.notebook.tuning.crew import PlaceLostError
from labkit.notebook.tuning.crew import Running
from labkit.notebook.tuning.crew import StudyRanks
from labkit.notebook.tuning.crew import run_at_once
from labkit.notebook.tuning.options import NUM_TRIALS
from labkit.notebook.tuning.options import RATES
from labkit.notebook.tuning.options import TuneOptions
from labkit.notebook.tuning.options import check_run_options
from labkit.notebook.tuning.study import RANKS
from labkit.notebook.tuning.study import Study
from labkit.notebook.tuning.study_view import StudyView
from labkit.notebook.tuning.study_view import ViewOfThreads
from labkit.options import check_values
from labkit.strategies import find_strategy

MAX_FIRST_FAILURES = 3
"""So many trials that fail before any did not end a study: what is wrong is wrong with
all of them."""


@dataclass(frozen=True)
class TuneRequest:
    """What a study is asked for."""

    work: Work
    space: Mapping[str, Any]
    strategy: str
    options: TuneOptions
    run_options: Mapping[str, Any]
    """For each run, as `Lab.train` takes them."""
    is_shown: bool = True
    fits: Callable[..., Any] | None = None
    """Makes a model of parameters, for the forecast."""

    def __post_init__(self) -> None:
        check_flag("live", self.is_shown)
        check_values(self.options)
        check_run_options(self.run_options)
        if self.options.resume and self.options.name is None:
            raise ValueError(
                "resume needs the name of the study; add name=... (--name NAME)"
            )


class Tuner:
    """Runs the trials of one study."""

    _is_exhausted = False
    _first_error: BaseException | None = None
    _length: int | None = None
    """How many values the metric of the first run had that finished."""

    def __init__(self, request: TuneRequest, ranks: StudyRanks) -> None:
        """Nothing has run. Raises ValueError for what cannot be."""
        self._request = request
        self._options = options = request.options
        self._ranks = ranks
        self._group_size = options.group_size(ranks.world_size)
        self._is_parallel = self._group_size < ranks.world_size
        self._run_options = {
            name: value
            for name, value in request.run_options.items()
            if value is not None
        }
        self._ranges = distributions_of(request.space)
        check_strategies(self._ranges)
        if "strategy" not in self._ranges:
            check_options(
                find_strategy(request.strategy),
                RunOptions(**self._run_options),
                device=ranks.device,
                world_size=self._group_size,
            )
        if options.sampler == "grid":
            check_grid(self._ranges)
        if request.fits is not None:
            check_fits(request.fits, self._ranges)
        self._takes_strategy = check_work(request.work, self._ranges)
        to_json = load_optuna().distributions.distribution_to_json
        space = {name: to_json(each) for name, each in self._ranges.items()}
        strategy = "several strategies" if "strategy" in space else request.strategy
        facts = {
            "space": json.dumps(space),
            "metric": options.metric,
            "mode": "max" if options.is_max else "min",
            "strategy": strategy,
        }
        self._optuna = storage.open_study(options, facts)
        name = self._optuna.study_name
        self.study = Study(self._optuna, storage.studies_folder() / name)
        self._num_trials = options.trials
        if options.sampler == "grid":
            size = math.prod(len(each.choices) for each in self._ranges.values())
            self._num_trials = min(size, options.trials or size)
        elif options.trials is None and options.seconds is None:
            self._num_trials = NUM_TRIALS
        self._optuna.stop = self._note_exhausted  # as a grid does; not for our loop
        self._said: set[str] = set()
        self._running = Running()
        self._using_optuna = threading.RLock()
        """Held for every step of Optuna: trials may run in several threads."""
        self._forecasting = threading.Lock()
        """Held while the user's function makes a model: one at a time."""

    def run(self) -> Study:
        """Run trials until there are enough, the time is over, or an interrupt."""
        options, study = self._options, self.study
        deadline = None
        if options.seconds is not None:
            deadline = time.monotonic() + options.seconds
        if options.resume:
            storage.repeat_unended(self._optuna)
        num_before = len(self._optuna.get_trials(deepcopy=False))
        self._optuna.sampler = storage.make_sampler(
            options, self._ranges, num_before, is_parallel=self._is_parallel
        )
        view = StudyView(study, is_shown=self._request.is_shown)
        view.left = lambda: self._left(deadline)
        if self._sees_other_samples():
            say(
                "batch_size is in the space: after the same step trials have seen "
                "different numbers of samples, so none is stopped for its loss; a "
                "metric that is logged once an epoch, such as val_loss, can be compared"
            )
        try:
            with self._ranks.divided(self._group_size) as places:
                if not self._is_parallel:
                    self._run_trials(places[0], view, deadline)
                else:
                    self._run_at_once(places, view, deadline)
        except KeyboardInterrupt:
            say(
                f"interrupted; {study.name} keeps what it has, and resume=True "
                f"(--resume) with name={study.name!r} goes on with it"
            )
        finally:
            view.close()
        return study

    def _sees_other_samples(self) -> bool:
        """Whether losses cannot be compared step by step, as labkit's pruners do."""
        options = self._options
        is_compared = isinstance(options.pruner, str) and options.pruner != "none"
        return is_compared and options.metric == "loss" and "batch_size" in self._ranges

    def _note_exhausted(self) -> None:
        self._is_exhausted = True

    def _run_at_once(
        self, places: Sequence[Place], view: StudyView, deadline: float | None
    ) -> None:
        """Run trials on all of `places`."""
        in_thread = ViewOfThreads(view)
        run_at_once(
            places,
            lambda place: self._run_trials(place, in_thread, deadline),
            self._running,
            view.tick,
        )

    def _run_trials(
        self,
        place: Place,
        view: StudyView | ViewOfThreads,
        deadline: float | None,
    ) -> None:
        """Run trials on the ranks of one place, until there are enough."""
        while (trial := self._next_trial(deadline)) is not None:
            try:
                self._run_trial(trial, place, deadline, view)
            except Exception:
                with contextlib.suppress(PlaceLostError):
                    bring_back(place)
                raise
            bring_back(place)

    def _next_trial(self, deadline: float | None) -> Any:
        """Another trial, which runs from now on; None where none is to begin."""
        if deadline is not None and time.monotonic() >= deadline:
            return None
        with self._using_optuna:
            trials = self._optuna.get_trials(deepcopy=False)
            num_begun = len(self.study.trials) + len(running(trials))
            if self._running.is_ending or self._is_exhausted:
                return None
            if self._num_trials is not None and num_begun >= self._num_trials:
                return None
            self._optuna.pruner = self._pruner(trials)
            return self._optuna.ask(self._ranges)

    def _pruner(self, trials: Sequence[Any]) -> Any:
        if self._length is None:
            self._length = first_length(trials)
        compared = self._options
        if self._sees_other_samples():
            compared = replace(compared, pruner="none")
        return storage.make_pruner(compared, self._length)

    @property
    def _has_pruner(self) -> bool:
        """Whether a trial that begins now is compared from its first value. Halving
        takes the first one that it sees for that of the first steps: of a trial in the
        middle it is too good, and all that come after would fall behind."""
        return self._length is not None or not isinstance(self._options.pruner, str)

    def _left(self, deadline: float | None) -> str:
        num_done = len(self.study.trials)
        of = "" if self._num_trials is None else f" of {self._num_trials}"
        now = running(self._optuna.get_trials(deepcopy=False))
        left = f", running trial {num_done + 1}{of}"
        if self._is_parallel:
            numbers = ", ".join(str(each.number) for each in now)
            left = f", running trials {numbers}{of}"
        if deadline is not None:
            left += f", {duration(max(0.0, deadline - time.monotonic()))} left"
        return left

    # ---- one trial ----

    def _run_trial(
        self,
        trial: Any,
        place: Place,
        deadline: float | None,
        view: StudyView | ViewOfThreads,
    ) -> None:
        """Run one trial to its end, whatever that is."""
        strategy, work, options = self._work_of(trial)
        watch = TrialWatch(
            trial,
            self._options.metric,
            deadline,
            view,
            self._said,
            options.get("checkpoint"),
            using_optuna=self._using_optuna,
            label=f"trial {trial.number}" if self._is_parallel else "",
            may_prune=self._has_pruner,
        )
        if self._request.fits is not None and self._skips(trial, strategy, options):
            return
        name = f"{self.study.name}-trial-{trial.number}"
        chosen = RunOptions(name=name, live=False, **options)
        error: BaseException | None = None
        try:
            with self._running.noting(watch):
                place.train(strategy, work, chosen, watch)
        except BaseException as raised:
            error = raised
        with self._using_optuna:
            self._note_run(trial, watch, place)
            if error is None:
                self._take_value(trial, watch)
            elif self._is_of_trial(error, watch):
                self._fail(trial, error, place)
            else:
                # An interrupt, too: without a result, to be run again.
                self._optuna.tell(trial, state=load_optuna().trial.TrialState.FAIL)
                raise error
            self._keep_best_checkpoint()
        if watch.was_interrupted:  # while it was being stopped for another reason
            raise KeyboardInterrupt

    def _is_of_trial(self, error: BaseException, watch: TrialWatch) -> bool:
        """Whether the error fails the trial, and not the study."""
        if isinstance(error, UserError):  # that ranks hang, once they run
            return watch.run is not None
        if isinstance(error, ValueError):  # some strategies may not take the options
            return "strategy" in self._ranges
        return isinstance(error, RankError | CellTimeoutError)

    def _skips(self, trial: Any, strategy: str, options: Mapping[str, Any]) -> bool:
        """Whether the trial is forecast not to fit, and does not run."""
        assert self._request.fits is not None
        state = load_optuna().trial.TrialState
        try:
            with self._forecasting:
                why = why_not(
                    self._request.fits,
                    partial(self._ranks.estimate, world_sizes=[self._group_size]),
                    trial.params,
                    strategy,
                    options,
                )
        except BaseException:
            with self._using_optuna:
                self._optuna.tell(trial, state=state.FAIL)
            raise
        if why:
            with self._using_optuna:
                trial.set_user_attr("skipped", why)
                self._optuna.tell(trial, state=state.PRUNED)
        return bool(why)

    def _work_of(self, trial: Any) -> tuple[str, Work, dict[str, Any]]:
        """Strategy, work and options of a trial's run."""
        request, params = self._request, dict(trial.params)
        strategy = params.get("strategy", request.strategy)
        if not self._takes_strategy:
            params.pop("strategy", None)
        options = {"seed": self._options.seed, **self._run_options}
        if options.get("checkpoint") is not None:
            folder = absolute(options["checkpoint"]) / self.study.name
            options["checkpoint"] = folder / f"trial-{trial.number}"
        if callable(request.work):
            return strategy, partial(request.work, **params), options
        return strategy, with_values(request.work, params), options

    def _note_run(self, trial: Any, watch: TrialWatch, place: Place) -> None:
        run = watch.run
        if run is None:
            return
        watch.report_rest()
        self.study.add_run(trial.number, run)
        trial.set_user_attr("run", run.name)
        if self._is_parallel:
            trial.set_user_attr(RANKS, place.ranks)
        trial.set_user_attr("steps", run.num_steps)
        trial.set_user_attr("seconds", run.seconds)
        if run.folder is not None:
            trial.set_user_attr("folder", run.folder.name)

    def _take_value(self, trial: Any, watch: TrialWatch) -> None:
        """The run ended well, or was stopped at a step."""
        state = load_optuna().trial.TrialState
        assert watch.run is not None
        if watch.run.state != "finished":
            if watch.why_stopped:
                trial.set_user_attr("why", watch.why_stopped)
                self._optuna.tell(trial, state=state.PRUNED)
            else:  # by `Run.stop`: it has no result, and is run again on resume
                self._optuna.tell(trial, state=state.FAIL)
            return
        value = self._value(watch)
        if value is None:
            self._optuna.tell(trial, state=state.FAIL)
            metric = self._options.metric
            has = metrics_of(watch.run)
            instead = (
                f"it has {', '.join(has)}. Choose one of them with metric (--metric), "
                "or log yours; fit logs val_loss if it is given validate=dataset"
                if has
                else "it took no optimizer step and logged nothing: call "
                f"optimizer.step() or log({metric}=...) in what is tuned"
            )
            raise ValueError(f"{watch.run.name} has no metric {metric!r}; {instead}")
        if math.isfinite(value):
            self._optuna.tell(trial, value)
        else:
            trial.set_user_attr("why", f"{self._options.metric} is {value}")
            self._optuna.tell(trial, state=state.PRUNED)

    def _value(self, watch: TrialWatch) -> float | None:
        assert watch.run is not None
        if self._options.metric not in RATES:
            return watch.metric.final()
        rate = watch.run.steps_per_s()
        if rate is None or self._options.metric == "steps_per_s":
            return rate
        collector = watch.run.collector
        each = [collector.series(rank, "samples")["value"] for rank in collector.ranks]
        return (
            rate * sum(float(x.mean()) for x in each if len(x)) / num_alike(watch.run)
        )

    def _fail(self, trial: Any, error: BaseException, place: Place) -> None:
        """The trial failed, and the study goes on; unless all have failed so far."""
        trial.set_user_attr("error", str(error))
        self._optuna.tell(trial, state=load_optuna().trial.TrialState.FAIL)
        name = f"{self.study.name}-trial-{trial.number}"
        if self._is_parallel:
            name += f" ({place.ranks})"
        if self._first_error is None:
            self._first_error = error
            say(f"{name} failed, and the study goes on; later failures get one line:")
            show_error(error)
        else:
            say(f"{name} failed: {in_one_line(error)}")
        done = self.study.trials
        goes_on = self._running.is_ending or self._running.have_steps
        have_all_failed = len(self.study.errors) == len(done) >= MAX_FIRST_FAILURES
        if have_all_failed and not goes_on:
            self._running.end()
            say(f"the first {len(done)} trials have failed, which ends the study")
            raise self._first_error

    def _keep_best_checkpoint(self) -> None:
        best = self.study.best_number
        for each in self._optuna.get_trials(deepcopy=False):
            # Nothing that was there before the trial is removed.
            is_own = each.user_attrs.get(OWN_FOLDER) and each.state.is_finished()
            if is_own and each.number != best:
                folder = Path(each.user_attrs[CHECKPOINT])
                shutil.rmtree(folder, ignore_errors=True)


def running(trials: Sequence[Any]) -> list[Any]:
    """Those that run now."""
    return [each for each in trials if each.state.name == "RUNNING"]


def first_length(trials: Sequence[Any]) -> int | None:
    """How many values the metric of the first run had that finished."""
    for each in trials:
        if each.state.name == "COMPLETE" and each.intermediate_values:
            return int(max(each.intermediate_values))
    return None


def bring_back(place: Place) -> None:
    """Restart the dead ranks of a place. PlaceLostError where that cannot be."""
    try:
        place.bring_back()
    except RuntimeError as error:
        raise PlaceLostError(str(error)) from error


def num_alike(run: Run) -> int:
    """How many ranks have the same samples, which count once."""
    return max((model.num_parts for model in run.models), default=1)


def metrics_of(run: Run) -> list[str]:
    """What a run that has ended can be judged by."""
    curves = run.collector.curves
    with curves.lock:
        curves.update(is_final=True)
        has_loss = any(curves.curve(rank, "loss").num_values for rank in curves.ranks)
        logged = curves.metrics()
    return [*["loss"] * has_loss, *logged, *(RATES if run.num_steps else ())]
