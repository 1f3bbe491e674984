"""Many runs on disk: finds, lists and deletes them."""

import contextlib
import shutil
from collections.abc import Container
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.checks import absolute
from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import is_run_name
from labkit.checks import short_repr
from labkit.notebook.runs import run_files
from labkit.notebook.runs.persistence import open_run
from labkit.notebook.runs.persistence import runs_folder
from labkit.notebook.runs.persistence import state_of
from labkit.notebook.runs.persistence import summarize
from labkit.notebook.runs.persistence import warn_once
from labkit.notebook.runs.record import RUN_STATES
from labkit.notebook.runs.run import Run
from labkit.strategies import STRATEGIES

_COLUMNS = (
    *("run", "when", "strategy", "ranks", "state", "steps", "last_loss"),
    *("steps_per_s", "seconds", "total_peak", "folder"),
)
_MANY = 20
"""So many names are listed where one is not found."""
_NAMES_SHOWN = 8
"""Of runs, in an error message."""


def load_run(name: str, folder: str | Path | None = None) -> Run:
    """Load a run from disk, in any notebook; needs neither a cluster nor torch.

    A run that another kernel is still running has its records until now; its
    `refresh()` adds the newer ones.

    Parameters
    ----------
    name : str
        Of the run, the newest one where several have it, or of its folder.
    folder : str or path, optional
        Where the runs are: by default what LABKIT_RUNS names, or `runs` in the
        working directory.

    Returns
    -------
    Run
        With its history, pictures and tables.

    Raises
    ------
    ValueError
        Where there is no such run.

    Examples
    --------
    >>> load_run("run-1").plot()
    """
    parent = runs_folder() if folder is None else absolute(folder)
    return open_run(_find(name, parent)[-1])


def _find(name: str, parent: Path, own: Sequence[str] = ()) -> list[Path]:
    """The folder of that name, or those of the runs with it, the newest last; `own` are
    the names of runs that are there besides."""
    if not isinstance(name, str):
        raise ValueError(
            f"{short_repr(name)} is not a run's name; give the name as a string"
        )
    exact, is_folder = parent / name, False
    with contextlib.suppress(OSError):  # a path that is too long
        is_folder = is_run_name(name) and exact.is_dir()
    if is_folder:
        try:
            run_files.read_info(exact)
        except (OSError, ValueError) as error:
            raise ValueError(f"{exact} has no run that can be read: {error}") from None
        return [exact]
    stored = list(_stored(parent))
    found = [path for path, info in stored if info["name"] == name]
    if not found:
        names = dict.fromkeys(info["name"] for _, info in stored)
        others = [each for each in names if each not in own]
        more = f" and {len(others) - _MANY} older ones" if len(others) > _MANY else ""
        have = [f"there are: {', '.join(others[-_MANY:])}{more}"] if others else []
        have += [f"of this lab: {', '.join(own[-_NAMES_SHOWN:])}"] if own else []
        there = "; ".join(have) or "there are: none; %%dist_train STRATEGY makes one"
        raise ValueError(f"there is no run {short_repr(name)} in {parent}; {there}")
    return found


def _stored(
    parent: Path, but: Container[Path | None] = ()
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The runs' folders and their `run.json`, oldest first; others are passed over,
    and so are those of `but`.

    Of one that has a `run.json` which cannot be read a line says so, once.
    """
    found = []
    try:
        paths = sorted(path for path in parent.iterdir() if path not in but)
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    except OSError as error:
        warn_once(parent, f"no runs can be read: {error}")
        paths = []
    for path in paths:
        try:
            found.append((path, run_files.read_info(path)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            warn_once(path, f"passed over a run that cannot be read: {error}")
    yield from sorted(found, key=lambda each: (each[1]["began"], each[0].name))


def find_runs(names: Sequence[str], own: Sequence[Run] = ()) -> list[Run]:
    """The runs with these names: those of `own`, or else from disk.

    Raises ValueError where there is no such run.
    """
    by_name = {run.name: run for run in own}
    found = []
    for name in names:
        if name in by_name:
            found.append(by_name[name])
        else:
            found.append(open_run(_find(name, runs_folder(), [*by_name])[-1]))
    return found


def list_runs(
    folder: str | Path | None = None,
    *,
    own: Sequence[Run] = (),
    strategy: str | None = None,
    state: str | None = None,
    last: int | None = None,
) -> pd.DataFrame:
    """List the runs on disk, newest last.

    Parameters
    ----------
    folder : str or path, optional
        Where the runs are, as for `load_run`.
    own : sequence of Run, optional
        Runs to list besides, such as `lab.runs`.
    strategy : str, optional
        List only the runs of this one.
    state : str, optional
        List only those that are "running", "finished", "failed", "interrupted" or
        "lost".
    last : int, optional
        List only the newest so many.

    Returns
    -------
    DataFrame
        By run name, or by folder where another run is found by that name: when,
        strategy, ranks, state, steps, last_loss, steps_per_s, seconds, total_peak
        (bytes of the rank that has most), folder.

    Raises
    ------
    ValueError
        For a `strategy`, `state` or `last` that is none.
    """
    if last is not None:
        check_count("last", last)
    if state is not None:
        check_choice("state", state, RUN_STATES)
    parent = runs_folder() if folder is None else absolute(folder)
    rows = [
        _row(run.name, run.info, run.folder, run.info.get("summary") or summarize(run))
        for run in own
    ]
    here = {run.folder for run in own}
    for path, info in _stored(parent, but=here):
        try:
            # Of one that has not ended there is no summary.
            run = None if info.get("summary") else open_run(path)
            with run_files.reading(path):
                summary = summarize(run) if run else info["summary"]
                rows.append(_row(info["name"], info, path, summary))
        except ValueError as error:
            warn_once(path, f"passed over a run that cannot be read: {error}")
    rows.sort(key=lambda row: (row["when"], row["folder"]))
    found = {row["run"]: row["folder"] for row in rows}  # as `find_runs` does
    found |= {run.name: "" if run.folder is None else run.folder.name for run in own}
    for row in rows:
        if row["folder"] != found[row["run"]]:
            row["run"] = row["folder"]
    if strategy is not None:  # also one of a later version
        known_to = [*STRATEGIES, *(row["strategy"] for row in rows)]
        check_choice("strategy", strategy, dict.fromkeys(known_to))
    wanted = {"strategy": strategy, "state": state}
    rows = [
        row
        for row in rows
        if all(value in (None, row[key]) for key, value in wanted.items())
    ]
    table = pd.DataFrame(rows[-last:] if last else rows, columns=[*_COLUMNS])
    return table.set_index("run")


def _row(
    name: str, info: Mapping[str, Any], folder: Path | None, summary: Mapping[str, Any]
) -> dict[str, Any]:
    when = pd.Timestamp.fromtimestamp(info["began"]).floor("s")
    words = {key: str(summary[key]) for key in ("strategy", "state")}
    # In JSON there is no infinity: it is a string there.
    numbers = {
        key: np.nan if (value := summary[key]) is None else float(value)
        for key in ("last_loss", "steps_per_s", "seconds", "total_peak")
    }
    counts = {key: int(summary[key]) for key in ("ranks", "steps")}
    place = "" if folder is None else folder.name
    return {"run": name, "when": when, **words, **numbers, **counts, "folder": place}


def delete_runs(*names: str, folder: str | Path | None = None) -> list[Path]:
    """Delete runs from disk.

    Parameters
    ----------
    *names : str
        Of runs, or of their folders.
    folder : str or path, optional
        Where the runs are, as for `load_run`.

    Returns
    -------
    list of Path
        The folders that were deleted.

    Raises
    ------
    ValueError
        Where there is no such run, several have that name, one is running, or a folder
        is a link; none is deleted.
    """
    parent = runs_folder() if folder is None else absolute(folder)
    doomed: dict[Path, None] = {}
    for name in names:
        found = _find(name, parent)
        if len(found) > 1:
            folders = ", ".join(path.name for path in found)
            raise ValueError(
                f"{len(found)} runs are called {name}; name their folders: {folders}"
            )
        if state_of(run_files.read_info(found[0])) == "running":
            raise ValueError(f"{name} is running; stop it before you delete it")
        if found[0].is_symlink():
            raise ValueError(f"{found[0]} is a link; remove it yourself")
        doomed[found[0]] = None
    for path in doomed:
        shutil.rmtree(path)
    return list(doomed)
