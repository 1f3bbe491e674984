"""Study: what was tried, how each trial did, and the best."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pandas as pd

from labkit.checks import UserError
from labkit.checks import absolute
from labkit.checks import is_run_name
from labkit.checks import short_repr
from labkit.notebook.runs.catalog import load_run
from labkit.notebook.runs.run import Run
from labkit.notebook.trials.work import CHECKPOINT
from labkit.notebook.tuning.storage import FILE
from labkit.notebook.tuning.storage import connected
from labkit.notebook.tuning.storage import has_study
from labkit.notebook.tuning.storage import is_unended
from labkit.notebook.tuning.storage import studies_folder
from labkit.records import significant

if TYPE_CHECKING:
    from labkit.notebook.plots.figure import RunFigure

STATES = {
    "COMPLETE": "finished",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "RUNNING": "running",
}

RANKS = "ranks"
"""The attribute of a trial with its ranks, where they were not all of the lab's."""


class Study:
    """Many training runs, to find the best parameters: `Lab.tune` returns it.

    Attributes
    ----------
    name : str
        What it is called; its runs are `<name>-trial-0` and so on.
    folder : Path
        Where it is on disk, as a database of Optuna's.
    optuna : optuna.study.Study
        Optuna's own, with all that Optuna can do with it.
    """

    def __init__(self, study: Any, folder: Path) -> None:
        self.name: str = study.study_name
        self.folder = folder
        self.optuna = study
        self._runs: dict[int, Run] = {}

    def __repr__(self) -> str:
        # Nothing here may differ from one run of the notebook to the next.
        num = len(self.table)
        return (
            f"<Study {self.name!r}: {self.metric} under {self.strategy}, {num} "
            f"trial{'s' * (num != 1)}>"
        )

    @property
    def metric(self) -> str:
        """What makes a trial better than another."""
        return str(self.optuna.user_attrs["metric"])

    @property
    def strategy(self) -> str:
        """That of its runs."""
        return str(self.optuna.user_attrs["strategy"])

    @property
    def is_max(self) -> bool:
        """Whether more is better."""
        return bool(self.optuna.user_attrs["mode"] == "max")

    @property
    def trials(self) -> list[Any]:
        """Optuna's trials that have run, in order; not those that were stopped with the
        kernel or the study, which are run again when the study is resumed."""
        return [
            each
            for each in self.optuna.get_trials(deepcopy=False)
            if each.state.name in STATES and not is_unended(each)
        ]

    @property
    def table(self) -> pd.DataFrame:
        """One row per trial: its parameters, value, state ("finished", "pruned",
        "failed", or "skipped", where it was forecast not to fit), steps, seconds, the
        ranks that ran it, if not all did, and the name of its run."""
        rows = [
            {
                "trial": each.number,
                **each.params,
                "value": value_of(each),
                "state": state_of(each),
                "steps": each.user_attrs.get("steps", 0),
                "seconds": each.user_attrs.get("seconds", math.nan),
                RANKS: each.user_attrs.get(RANKS, ""),
                "run": each.user_attrs.get("run", ""),
            }
            for each in self.trials
        ]
        names = list(json.loads(self.optuna.user_attrs["space"]))
        columns = ["trial", *names, "value", "state", "steps", "seconds"]
        columns += [RANKS] if any(row[RANKS] for row in rows) else []
        columns += ["run"]
        return pd.DataFrame(rows, columns=columns).set_index("trial")

    @property
    def curves(self) -> pd.DataFrame:
        """The metric of every trial as it was looked at while it ran: trial, place and
        value, where place is 1 for the first logged value."""
        rows = [
            (each.number, place, value)
            for each in self.trials
            for place, value in sorted(each.intermediate_values.items())
        ]
        return pd.DataFrame(rows, columns=["trial", "place", "value"])

    @property
    def errors(self) -> dict[int, str]:
        """Why trials failed, by their number."""
        return {
            each.number: each.user_attrs["error"]
            for each in self.trials
            if "error" in each.user_attrs
        }

    @property
    def best_trial(self) -> int:
        """The number of the trial with the best value, of those that finished.

        RuntimeError where none did.
        """
        number = self.best_number
        if number is None:
            raise UserError(
                f"no trial of {self.name} has finished; its table and errors say how "
                "they ended"
            )
        return number

    @property
    def best_number(self) -> int | None:
        """As `best_trial`; None where no trial has finished."""
        done = [each for each in self.trials if each.state.name == "COMPLETE"]
        if not done:
            return None
        choose = max if self.is_max else min
        found: int = choose(done, key=lambda each: each.value).number
        return found

    def _best(self) -> Any:
        number = self.best_trial
        return next(each for each in self.trials if each.number == number)

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial, by name."""
        return dict(self._best().params)

    @property
    def best_value(self) -> float:
        """The value of the best trial."""
        return float(self._best().value)

    @property
    def best_run(self) -> Run:
        """The run of the best trial."""
        return self.run_of(self.best_trial)

    @property
    def best_checkpoint(self) -> Path | None:
        """The folder with the best run's checkpoints, where `checkpoint` was given."""
        found = self._best().user_attrs.get(CHECKPOINT)
        return None if found is None else Path(found)

    def run_of(self, trial: int) -> Run:
        """Find the run of a trial.

        Parameters
        ----------
        trial : int
            Its number, as in the table.

        Returns
        -------
        Run
            That of this lab, or else from disk.

        Raises
        ------
        ValueError
            Where there is no such trial, or its run is not on disk.
        """
        if trial in self._runs:
            return self._runs[trial]
        for each in self.trials:
            if each.number == trial:
                folder = each.user_attrs.get("folder") or each.user_attrs.get("run", "")
                return load_run(Path(folder).name, self.folder.parents[1])
        raise ValueError(f"{self.name} has no trial {short_repr(trial)}")

    def add_run(self, trial: int, run: Run) -> None:
        """Keep the run of a trial.

        Parameters
        ----------
        trial : int
            Its number.
        run : Run
            What was run.
        """
        self._runs[trial] = run

    def summary(self) -> str:
        """Say in one line how the study stands.

        Returns
        -------
        str
            As "lr: 12 trials, 7 finished, 4 pruned, 1 failed; best loss 0.12, trial 5".
        """
        states = [state_of(each) for each in self.trials]
        parts = [f"{len(states)} trial{'s' * (len(states) != 1)}"]
        for state in (*STATES.values(), "skipped"):
            if count := states.count(state):
                parts.append(f"{count} {state}")
        line = f"{self.name}: {', '.join(parts)}"
        number = self.best_number
        if number is None:
            return line
        best = significant(self.best_value)
        return f"{line}; best {self.metric} {best}, trial {number}"

    def plot(self) -> "RunFigure":
        """Plot the metric of every trial, the best one in front, and their values.

        Returns
        -------
        RunFigure
            A matplotlib Figure that displays itself.
        """
        return self.drawing().figure()

    def drawing(self, left: str = "") -> Any:
        """Give what a picture of it holds.

        Parameters
        ----------
        left : str, optional
            What is left of it, in words, while it runs.

        Returns
        -------
        StudyDrawing
            Numbers and words alone, for another process.
        """
        from labkit.notebook.tuning.study_plot import Line
        from labkit.notebook.tuning.study_plot import StudyDrawing

        trials = self.trials
        if left:  # one runs, whose kernel is this one
            found = self.optuna.get_trials(deepcopy=False)
            trials += [each for each in found if each.state.name == "RUNNING"]
        lines = [
            Line(
                each.number,
                STATES[each.state.name],
                sorted(each.intermediate_values.items()),
                value_of(each),
            )
            for each in trials
            if "skipped" not in each.user_attrs
        ]
        best = self.best_number
        title = self.summary() + left
        return StudyDrawing(title, self.metric, self.is_max, lines, best)


def state_of(trial: Any) -> str:
    """How a trial stands, in a word."""
    return "skipped" if "skipped" in trial.user_attrs else STATES[trial.state.name]


def value_of(trial: Any) -> float:
    """A trial's value; of one that was pruned the last there was."""
    if trial.state.name == "COMPLETE":
        return float(trial.value)
    if trial.state.name == "PRUNED" and trial.intermediate_values:
        return float(trial.intermediate_values[max(trial.intermediate_values)])
    return math.nan


def load_study(name: str, folder: str | Path | None = None) -> Study:
    """Load a study from disk, in any notebook; needs no cluster.

    Parameters
    ----------
    name : str
        What it was called.
    folder : str or path, optional
        Where the runs are: by default what LABKIT_RUNS names, or `runs` in the working
        directory.

    Returns
    -------
    Study
        With its table, its best run and its picture.

    Raises
    ------
    ValueError
        Where there is no such study.

    Examples
    --------
    >>> load_study("study-1").best_params
    """
    parent = studies_folder() if folder is None else absolute(folder) / "studies"
    if not is_run_name(name) or not has_study(parent / name):
        folders = [path.parent for path in sorted(parent.glob(f"*/{FILE}"))]
        there = [folder.name for folder in folders if has_study(folder)]
        have = ", ".join(there) or "none; %%dist_tune makes one"
        raise ValueError(
            f"there is no study {short_repr(name)} in {parent}; there are: {have}"
        )
    return Study(connected(parent / name), parent / name)
