"""Runs a study: one trial after the other, on ranks that are warm."""

import ast
import inspect
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from labkit import timeouts
from labkit.checks import UserError
from labkit.checks import absolute
from labkit.checks import check_code
from labkit.notebook.execution.cell_execution import CellExecution
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.execution.errors import RankError
from labkit.notebook.execution.training_run import RunWatch
from labkit.notebook.kernel.background import show_error
from labkit.notebook.kernel.output import say
from labkit.notebook.runs.progress import duration
from labkit.notebook.runs.run import Run
from labkit.notebook.tuning import storage
from labkit.notebook.tuning.live_metric import LiveMetric
from labkit.notebook.tuning.options import NUM_TRIALS
from labkit.notebook.tuning.options import RATES
from labkit.notebook.tuning.options import TuneOptions
from labkit.notebook.tuning.space import check_fits
from labkit.notebook.tuning.space import check_grid
from labkit.notebook.tuning.space import check_strategies
from labkit.notebook.tuning.space import distributions_of
from labkit.notebook.tuning.space import load_optuna
from labkit.notebook.tuning.space import why_not
from labkit.notebook.tuning.study import CHECKPOINT
from labkit.notebook.tuning.study import Study
from labkit.notebook.tuning.study_view import StudyView
from labkit.options import check_values

MAX_FIRST_FAILURES = 3
"""So many trials that fail before any did not end a study: what is wrong is wrong with
all of them."""
OWN_FOLDER = "has_own_folder"
"""Whether a trial has made the folder of its checkpoints."""

Work = str | Callable[..., Any]
Train = Callable[..., Run]
"""`train(strategy, work, name=..., watch=..., **options)`."""


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


class TrialWatch(RunWatch):
    """Looks at a trial's metric while it runs, and stops it where that is of no use."""

    def __init__(
        self,
        trial: Any,
        metric: str,
        deadline: float | None,
        view: StudyView,
        said: set[str],
        checkpoint: Path | None,
    ) -> None:
        """`said` are the notes that trials before had under them."""
        self.run: Run | None = None
        """None until it has begun."""
        self.why_stopped = ""
        self._trial = trial
        self._checkpoint = checkpoint
        self._is_own_folder = checkpoint is not None and not checkpoint.exists()
        self._name = metric
        self._deadline = deadline
        self._view = view
        self._said = said
        self._asked_at = math.inf

    def begin(self, run: Run, execution: CellExecution) -> None:
        self.run, self._execution = run, execution
        self.metric = LiveMetric(run.collector, self._name)
        if self._checkpoint is not None:
            self._trial.set_user_attr(CHECKPOINT, str(self._checkpoint))
            self._trial.set_user_attr(OWN_FOLDER, self._is_own_folder)

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
            self._trial.report(value, place)
            if self.why_stopped:
                continue  # these points do not come again, and belong to its curve
            if not math.isfinite(value):
                self._stop(f"{self._name} is {value}")
            elif self._trial.should_prune():
                self._stop("it fell behind")

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
            self._trial.report(value, place)


class Tuner:
    """Runs the trials of one study."""

    def __init__(
        self,
        request: TuneRequest,
        train: Train,
        bring_back: Callable[[], Any],
        estimate: Callable[..., Any],
    ) -> None:
        """Nothing has run. `bring_back()` restarts dead ranks, `estimate` is that of
        the lab. Raises ValueError for what cannot be."""
        check_values(request.options)
        if request.options.resume and request.options.name is None:
            raise ValueError(
                "resume needs the name of the study; add name=... (--name NAME)"
            )
        self._request = request
        self._options = options = request.options
        self._train = train
        self._bring_back = bring_back
        self._ranges = distributions_of(request.space)
        check_strategies(self._ranges)
        if options.sampler == "grid":
            check_grid(self._ranges)
        if request.fits is not None:
            check_fits(request.fits, self._ranges)
        self._estimate = estimate
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
        self._is_exhausted = False
        self._optuna.stop = self._note_exhausted  # as a grid does; not for our loop
        self._said: set[str] = set()
        self._first_error: BaseException | None = None

    def run(self) -> Study:
        """Run trials until there are enough, the time is over, or an interrupt."""
        options, study = self._options, self.study
        began = time.monotonic()
        deadline = None if options.seconds is None else began + options.seconds
        if options.resume:
            storage.repeat_unended(self._optuna)
        num_before = len(self._optuna.get_trials(deepcopy=False))
        self._optuna.sampler = storage.make_sampler(options, self._ranges, num_before)
        view = StudyView(study, is_shown=self._request.is_shown)
        if self._sees_other_samples():
            say(
                "batch_size is in the space: after the same step trials have seen "
                "other numbers of samples, so none is stopped for its loss; a metric "
                "that is logged once an epoch, as val_loss, can be compared"
            )
        try:
            while self._is_to_go_on(deadline):
                view.left = self._left(began, deadline)
                self._run_trial(deadline, view)
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

    def _is_to_go_on(self, deadline: float | None) -> bool:
        is_over = deadline is not None and time.monotonic() >= deadline
        if is_over or self._is_exhausted:
            return False
        return self._num_trials is None or len(self.study.trials) < self._num_trials

    def _left(self, began: float, deadline: float | None) -> str:
        num_done = len(self.study.trials)
        of = "" if self._num_trials is None else f" of {self._num_trials}"
        left = f", running trial {num_done + 1}{of}"
        if deadline is not None:
            left += f", {duration(max(0.0, deadline - time.monotonic()))} left"
        return left

    # ---- one trial ----

    def _run_trial(self, deadline: float | None, view: StudyView) -> None:
        """Run one trial to its end, whatever that is."""
        compared = self._options
        if self._sees_other_samples():
            compared = replace(compared, pruner="none")
        self._optuna.pruner = storage.make_pruner(compared, self._length())
        trial = self._optuna.ask(self._ranges)
        strategy, work, options = self._work_of(trial)
        metric, folder = self._options.metric, options.get("checkpoint")
        watch = TrialWatch(trial, metric, deadline, view, self._said, folder)
        if self._request.fits is not None and self._skips(trial, strategy, options):
            return
        name = f"{self.study.name}-trial-{trial.number}"
        try:
            self._train(strategy, work, name=name, watch=watch, **options)
        except BaseException as error:
            self._note_run(trial, watch)
            if not self._is_of_trial(error, watch):
                # An interrupt, too: without a result, to be run again.
                self._optuna.tell(trial, state=load_optuna().trial.TrialState.FAIL)
                raise
            self._bring_back()
            self._fail(trial, error)
        else:
            self._note_run(trial, watch)
            self._take_value(trial, watch)
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
        try:
            why = why_not(
                self._request.fits, self._estimate, trial.params, strategy, options
            )
        except BaseException:
            self._optuna.tell(trial, state=load_optuna().trial.TrialState.FAIL)
            raise
        if why:
            trial.set_user_attr("skipped", why)
            self._optuna.tell(trial, state=load_optuna().trial.TrialState.PRUNED)
        return bool(why)

    def _length(self) -> int | None:
        """How many values the metric of the first run had that finished."""
        for each in self._optuna.get_trials(deepcopy=False):
            if each.state.name == "COMPLETE" and each.intermediate_values:
                return int(max(each.intermediate_values))
        return None

    def _work_of(self, trial: Any) -> tuple[str, Work, dict[str, Any]]:
        """Strategy, work and options of a trial's run."""
        request, params = self._request, dict(trial.params)
        strategy = params.get("strategy", request.strategy)
        if not self._takes_strategy:
            params.pop("strategy", None)
        options = {"seed": self._options.seed, **request.run_options}
        if options.get("checkpoint") is not None:
            folder = absolute(options["checkpoint"]) / self.study.name
            options["checkpoint"] = folder / f"trial-{trial.number}"
        if callable(request.work):
            return strategy, partial(request.work, **params), options
        return strategy, with_values(request.work, params), options

    def _note_run(self, trial: Any, watch: TrialWatch) -> None:
        run = watch.run
        if run is None:
            return
        watch.report_rest()
        self.study.add_run(trial.number, run)
        trial.set_user_attr("run", run.name)
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
            curves = watch.run.collector.curves
            with curves.lock:
                curves.update(is_final=True)
                has = ["loss", *curves.metrics()]
            raise ValueError(
                f"{watch.run.name} has no metric {self._options.metric!r}; it has "
                f"{', '.join([*has, *RATES])}. Choose one of them with metric "
                "(--metric), or log yours"
            )
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

    def _fail(self, trial: Any, error: BaseException) -> None:
        """The trial failed, and the study goes on; unless all have failed so far."""
        trial.set_user_attr("error", str(error))
        self._optuna.tell(trial, state=load_optuna().trial.TrialState.FAIL)
        name = f"{self.study.name}-trial-{trial.number}"
        if self._first_error is None:
            self._first_error = error
            say(f"{name} failed, and the study goes on; later failures get one line:")
            show_error(error)
        else:
            say(f"{name} failed: {str(error).splitlines()[0]}")
        done = self.study.trials
        if len(done) == MAX_FIRST_FAILURES and len(self.study.errors) == len(done):
            say(f"the first {len(done)} trials have failed, which ends the study")
            raise self._first_error

    def _keep_best_checkpoint(self) -> None:
        best = self.study.best_number
        for each in self._optuna.get_trials(deepcopy=False):
            # Nothing that was there before the trial is removed.
            if each.user_attrs.get(OWN_FOLDER) and each.number != best:
                folder = Path(each.user_attrs[CHECKPOINT])
                shutil.rmtree(folder, ignore_errors=True)


def num_alike(run: Run) -> int:
    """How many ranks have the same samples, which count once."""
    return max((model.num_parts for model in run.models), default=1)


def check_work(work: Any, ranges: Mapping[str, Any]) -> bool:
    """Whether the work takes the strategy as a parameter, too. ValueError where it
    does not take what is in the space."""
    if not callable(work):
        check_code(work)
        if work.startswith("%%"):
            raise ValueError(
                "the cell begins with a magic of its own, before which no parameters "
                "can be set; put it into a function, or leave the magic out"
            )
        return True
    signature = inspect.signature(work)
    kinds = [each.kind for each in signature.parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    missing = [
        name
        for name in ranges
        if name not in signature.parameters and name != "strategy"
    ]
    if missing:
        raise ValueError(
            f"{getattr(work, '__name__', 'the function')}{signature} does not take "
            f"{', '.join(missing)}, which the space has; add it to its parameters"
        )
    return "strategy" in signature.parameters


def with_values(code: str, params: Mapping[str, Any]) -> str:
    """The cell with its parameters as variables, in its first line, or that of the last
    import from __future__: what is kept of the run can be run by itself, and a cell's
    lines have their numbers."""
    values = "; ".join(f"{name} = {value!r}" for name, value in params.items())
    if after := end_of_future(code):
        return f"{code[:after]}; {values}{code[after:]}"
    join = "  " if code.startswith("# %%") else "\n"
    return f"{values}{join}{code}"


def end_of_future(code: str) -> int:
    """Where the last import from __future__ ends, before which nothing but a docstring
    may stand; 0 where there is none."""
    after, lines = 0, code.splitlines(keepends=True)
    for number in range(1, len(lines) + 1) if "__future__" in code else ():
        try:
            # Not the whole cell, which may hold magics.
            body = ast.parse("".join(lines[:number])).body
        except SyntaxError:  # in the middle of a statement
            continue
        first = list(itertools.takewhile(comes_first, body))
        for each in first:
            if isinstance(each, ast.ImportFrom):
                row, column = each.end_lineno or 0, each.end_col_offset or 0  # in bytes
                before = lines[row - 1].encode()[:column].decode()
                after = len("".join(lines[: row - 1]) + before)
        if len(first) < len(body):
            break
    return after


def comes_first(statement: ast.stmt) -> bool:
    """Whether it is an import from __future__, or text, as a docstring is."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
