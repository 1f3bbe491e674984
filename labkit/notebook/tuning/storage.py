"""A study on disk: Optuna's own, in one SQLite file.

Optuna's journal of one line a change would do as well, but for its lock, which a killed
kernel leaves behind. SQLite's file could be opened and written to after each of 25
kills in the middle of a write.
"""

import contextlib
import itertools
import os
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from labkit.checks import UserError
from labkit.notebook.runs.persistence import runs_folder
from labkit.notebook.runs.persistence import state_of
from labkit.notebook.trials.space import load_optuna
from labkit.notebook.tuning.options import TuneOptions

FILE = "study.db"
KERNEL = "kernel"
"""The process that runs the study, or did so last."""
REPEATED = "repeated"
"""Numbers of trials that were run again, of a study that was resumed."""
OF_THE_GRID = ("grid_id", "search_space")
"""System attributes by which Optuna's GridSampler knows a trial."""


def studies_folder() -> Path:
    """Where the studies of this place are, each in a folder of its own."""
    return runs_folder() / "studies"


def new_name() -> str:
    names = (f"study-{number}" for number in itertools.count(1))
    return next(name for name in names if not (studies_folder() / name).exists())


def open_study(options: TuneOptions, facts: dict[str, Any]) -> Any:
    """The study of this name: a new one, or with `resume` that on disk.

    `facts` say what is tried and measured. ValueError where they are others than those
    of the study that is resumed, and for a name that is taken.
    """
    folder = studies_folder() / (options.name or new_name())
    is_there = has_study(folder)
    if not options.resume and (not is_there or is_empty(connected(folder))):
        for path in folder.glob(f"{FILE}*"):
            path.unlink()
        is_there = False
    if is_there and not options.resume:
        raise ValueError(
            f"there is a study {folder.name!r} in {folder.parent}; add resume=True "
            "(--resume) to go on with it, or choose another name"
        )
    if options.resume and not is_there:
        raise ValueError(
            f"there is no study {folder.name!r} in {folder.parent} yet; leave out "
            "resume (--resume) to create it, or check the name"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"a study is kept on disk, and {folder} cannot be made: {error}; set "
            "LABKIT_RUNS to a folder that can be written to"
        ) from None
    study = connected(folder, is_max=options.is_max)
    if not is_there:
        for name, value in facts.items():
            study.set_user_attr(name, value)
        study.set_user_attr(KERNEL, this_kernel())
        return study
    check_left(study)
    for name, value in facts.items():
        if study.user_attrs.get(name) != value:
            raise ValueError(
                f"the study {folder.name!r} was created with {name} = "
                f"{study.user_attrs.get(name)}, and this call has {value}; use the "
                f"same {name}, or choose another name"
            )
    study.set_user_attr(KERNEL, this_kernel())
    return study


def this_kernel() -> dict[str, Any]:
    """This process, to be known again by `persistence.state_of`."""
    created = psutil.Process().create_time()
    found = {"host": socket.gethostname(), "pid": os.getpid(), "pid_created": created}
    return {"state": "running", **found}


def check_left(study: Any) -> None:
    """ValueError where another kernel still runs the study, as far as is known here."""
    kernel = study.user_attrs.get(KERNEL, {})
    trials = study.get_trials(deepcopy=False)
    if (
        any(each.state.name == "RUNNING" for each in trials)
        and kernel.get("host") == socket.gethostname()
        and kernel["pid"] != os.getpid()
        and state_of(kernel) == "running"
    ):
        raise ValueError(
            f"the study {study.study_name!r} runs in another kernel, process "
            f"{kernel['pid']}; wait for its end, or interrupt it there"
        )


def has_study(folder: Path) -> bool:
    """Whether there is a study in `folder`, and not only what a kernel has left that
    was killed while it made one."""
    if not (folder / FILE).is_file():
        return False
    names: list[str] = load_optuna().get_all_study_names(database(folder))
    return folder.name in names


def database(folder: Path) -> Any:
    """Optuna's storage in `folder`."""
    return load_optuna().storages.RDBStorage(f"sqlite:///{folder / FILE}")


def connected(folder: Path, *, is_max: bool | None = None) -> Any:
    """Optuna's study in `folder`; made where there is none and `is_max` says how."""
    optuna = load_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = database(folder)
        if is_max is None:
            return optuna.load_study(study_name=folder.name, storage=storage)
        return optuna.create_study(
            study_name=folder.name,
            storage=storage,
            direction="maximize" if is_max else "minimize",
            load_if_exists=True,
        )


def repeat_unended(study: Any) -> None:
    """Have the trials run again that had no result when the study, or its kernel, was
    stopped."""
    repeated = list(study.user_attrs.get(REPEATED, []))
    for trial in study.get_trials(deepcopy=False):
        if is_unended(trial) and trial.number not in repeated:
            if not trial.state.is_finished():
                with contextlib.suppress(RuntimeError):  # another has just done so
                    study.tell(trial.number, state=load_optuna().trial.TrialState.FAIL)
            # Not `enqueue_trial`, after which a GridSampler does not know it again.
            attrs = trial.system_attrs
            again = load_optuna().trial.create_trial(
                state=load_optuna().trial.TrialState.WAITING,
                params=trial.params,
                distributions=trial.distributions,
                system_attrs={k: attrs[k] for k in OF_THE_GRID if k in attrs},
            )
            study.add_trial(again)
            repeated.append(trial.number)
    study.set_user_attr(REPEATED, repeated)


def is_empty(study: Any) -> bool:
    """Whether nothing came of it: what it was asked for could not be."""
    trials = study.get_trials(deepcopy=False)
    return all(each.state.name == "FAIL" and is_unended(each) for each in trials)


def is_unended(trial: Any) -> bool:
    """Whether a trial of another kernel, or one that was interrupted, has no result."""
    state = trial.state.name
    return state == "RUNNING" or (state == "FAIL" and "error" not in trial.user_attrs)


def make_sampler(
    options: TuneOptions,
    ranges: Mapping[str, Any],
    num_before: int,
    *,
    is_parallel: bool,
) -> Any:
    """Optuna's sampler; another seed for the trials after `num_before`. Where several
    trials run at once, one is not to try the same as another that has no value yet."""
    samplers = load_optuna().samplers
    if options.sampler == "grid":
        choices = {name: list(each.choices) for name, each in ranges.items()}
        return samplers.GridSampler(choices, seed=options.seed % 2**32)
    seed = (options.seed + num_before) % 2**32
    if options.sampler == "random":
        return samplers.RandomSampler(seed=seed)
    if options.sampler != "tpe":
        return options.sampler
    with warnings.catch_warnings():
        experimental = load_optuna().exceptions.ExperimentalWarning
        warnings.simplefilter("ignore", experimental)
        return samplers.TPESampler(seed=seed, constant_liar=is_parallel)


def make_pruner(options: TuneOptions, length: int | None) -> Any:
    """Optuna's pruner for runs of so many values; none that prunes before a run has
    finished, so that `length` is known."""
    pruners = load_optuna().pruners
    found = options.pruner
    if not isinstance(found, str):
        return found
    if length is None or found == "none":
        return pruners.NopPruner()
    least = max(1, length // 27)
    if found == "hyperband":
        return pruners.HyperbandPruner(least, max(length, least + 1), 3)
    if found == "halving":
        return pruners.SuccessiveHalvingPruner(least, 3)
    return pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=length // 10)
