"""Runs on disk: keeps them as they run; loads, lists and deletes them."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import is_run_name
from labkit.checks import shown
from labkit.notebook import store
from labkit.notebook.collector import Collector
from labkit.notebook.runs import STATES
from labkit.notebook.runs import Restart
from labkit.notebook.runs import Run
from labkit.records import COMPONENTS
from labkit.records import CheckpointPlan
from labkit.records import Collective
from labkit.records import Measurement
from labkit.records import ModelFacts
from labkit.records import Outcome
from labkit.records import Progress
from labkit.records import TrainOptions
from labkit.strategies import STRATEGIES

FOLDER_VARIABLE = "LABKIT_RUNS"
"""The environment variable that names the folder of all runs."""

_VERSIONED = ("torch", "labkit", "deepspeed")
_COLUMNS = (
    "run",
    "when",
    "strategy",
    "ranks",
    "state",
    "steps",
    "last_loss",
    "steps_per_s",
    "seconds",
    "total_peak",
    "folder",
)
_MANY = 20
"""So many names are listed where one is not found."""
_NAMES_SHOWN = 8
"""Of runs, in an error message."""
_warned: set[Path] = set()


def runs_folder() -> Path:
    """The folder of all runs: what LABKIT_RUNS names, or `runs` where we are."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "runs").expanduser().absolute()


# ---- while it runs ----


def begin(
    run: Run,
    *,
    seed: int,
    devices: Sequence[str],
    backend: str,
    config: Mapping[str, Any] | None,
    checkpoints: CheckpointPlan | None = None,
    resumed_from: int | None = None,
) -> None:
    """Give a run its folder, with what is to be run.

    Where that cannot be written the run goes on without, and a line says so once.
    """
    run.info = {
        "began": time.time(),
        "seed": seed,
        "config": dict(config or {}),
        "devices": list(devices),
        "backend": backend,
        "versions": versions(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_created": psutil.Process().create_time(),
    }
    if checkpoints is not None:
        run.info["checkpoints"] = asdict(checkpoints)
        run.info["resumed_from"] = resumed_from
        run.info["restarts"] = []
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(run.info["began"]))
    try:
        run.folder = _make_folder(runs_folder(), f"{when}-{run.name}")
        store.write_info(run.folder, describe(run))
    except OSError as error:
        run.folder = None
        _warn(runs_folder(), f"{run.name} is not kept on disk: {error}")


def _make_folder(parent: Path, name: str) -> Path:
    """A new folder of that name; with a number if another kernel was as quick."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}.{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def save(run: Run) -> None:
    """Write what is known of a run by now."""
    if run.folder is None:
        return
    try:
        store.write_info(run.folder, describe(run))
    except OSError as error:
        _warn(run.folder, f"{run.name} is not on disk as it is now: {error}")


def restart(run: Run, outcomes: Sequence[Outcome], restarted: Restart) -> None:
    """A run goes on after ranks died, which left these outcomes: keep its records up
    to there, and give the next a folder of their own."""
    for outcome in outcomes:
        _take_outcome(run, outcome)
    run.collector.restart(restarted.step, restarted.seconds)
    run.info["restarts"].append(asdict(restarted))
    if run.folder is None:
        return
    try:
        journals_of(run).mkdir()
    except OSError as error:
        _warn(run.folder, f"{run.name} is not on disk as it is now: {error}")
    save(run)


def journals_of(run: Run) -> Path:
    """Where its ranks keep their records now."""
    assert run.folder is not None
    return store.journal_folder(run.folder, run.collector.num_restarts)


def end(run: Run, state: str, outcomes: Sequence[Outcome]) -> None:
    """A run has ended so on its ranks: write its records, then all that is known.

    Records that only a rank's journal has are taken in before.
    """
    for outcome in outcomes:
        _take_outcome(run, outcome)
    run.end(state)
    kept = [asdict(outcome) for outcome in sorted(outcomes, key=lambda o: o.rank)]
    for each in kept:
        del each["traceback"]
    run.info["outcomes"] = kept
    run.info["summary"] = summarize(run)
    if run.folder is None:
        return
    try:
        store.write_records(run.folder, run.collector)
    except OSError as error:
        _warn(run.folder, f"the records of {run.name} are not on disk: {error}")
    save(run)


def _take_outcome(run: Run, outcome: Outcome) -> None:
    collector, rank = run.collector, outcome.rank
    has_died = outcome.status in ("died", "restarted")
    if run.folder is not None and (
        has_died
        or collector.lost[rank]
        or collector.num_received[rank] < outcome.num_records
    ):
        store.read_journal(run.folder, rank, collector)
    if not has_died:
        collector.finish(rank, outcome.num_records)
    if collector.lost[rank]:
        _say(
            f"{collector.lost[rank]:,} records of rank {rank} never came, and are in "
            "no journal"
        )
    if outcome.num_not_on_disk:
        _say(
            f"rank {rank} had {outcome.num_not_on_disk:,} of its "
            f"{outcome.num_records:,} records in memory alone while it ran: "
            f"{outcome.disk_error}"
        )


def _warn(folder: Path, text: str) -> None:
    """Say it, but once for each folder."""
    if folder not in _warned:
        _warned.add(folder)
        _say(text)


def _say(text: str) -> None:
    print(f"labkit: {text}", file=sys.stderr)


def versions() -> dict[str, str]:
    """Of Python and the packages that a run depends on; "" for what is not there."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


# ---- to and from run.json ----


def describe(run: Run) -> dict[str, Any]:
    """All of a run but its records, for `store.write_info`."""
    collector = run.collector
    return {
        "name": run.name,
        "strategy": run.strategy,
        "state": run.state,
        "seconds": run.elapsed(),
        "world_size": run.world_size,
        "ranks": collector.ranks,
        "options": run.options.for_message(),
        **run.info,
        "code": run.code,
        "steps": collector.steps,
        "progress": {rank: asdict(p) for rank, p in collector.progress.items()},
        "lost": collector.lost,
        "mismatches": run.mismatches,
        "measurements": {
            rank: [asdict(each) for each in measured]
            for rank, measured in collector.measurements.items()
        },
    }


def open_run(folder: Path) -> Run:
    """The run in `folder`. ValueError where there is none to read."""
    with store.reading(folder):
        info = store.read_info(folder)
        options = store.known(TrainOptions, info["options"])
        collector = Collector(info["ranks"], info.get("resumed_from") or 0)
        run = Run(info["name"], info["strategy"], str(info["code"]), collector, options)
        run.folder = folder
        take(run, info)

    def reload() -> None:
        with store.reading(folder):
            take(run, store.read_info(folder))

    run._reload = reload
    return run


def take(run: Run, info: dict[str, Any]) -> None:
    """Bring a run from disk up to date with its `run.json` and its records."""
    assert run.folder is not None
    collector = run.collector
    state = state_of(info)
    has_ended = state not in ("running", "lost")
    restarts = [store.known(Restart, each) for each in info.get("restarts", [])]
    store.read_records(
        run.folder,
        collector,
        restarts=[(each.step, each.seconds) for each in restarts],
        is_growing=state == "running",
    )
    other = info.keys() - describe(Run("", "", "", Collector([]))).keys()
    run.info = {key: info[key] for key in info if key in other}
    run._mismatches = [str(each) for each in info["mismatches"]]
    for rank in collector.ranks:
        collector.measurements[rank] = [
            Measurement(
                memory={name: int(each["memory"][name]) for name in COMPONENTS},
                collectives=[store.known(Collective, c) for c in each["collectives"]],
                models=[store.known(ModelFacts, m) for m in each["models"]],
                seconds=float(each.get("seconds", 0.0)),
            )
            for each in info["measurements"][str(rank)]
        ]
        if has_ended:
            collector.steps[rank] = int(info["steps"][str(rank)])
            collector.lost[rank] = int(info["lost"][str(rank)])
            collector.progress[rank] = store.known(
                Progress, info["progress"][str(rank)]
            )
    run.state = state
    run.seconds = float(info["seconds"])
    if state != "running":
        run.has_ended.set()
    if state == "running":
        run._started = time.monotonic() - (time.time() - info["began"])
    elif state == "lost":
        ends = [collector.records(rank)["seconds"] for rank in collector.ranks]
        run.seconds = max([run.seconds, *(float(e[-1]) for e in ends if len(e))])


def state_of(info: Mapping[str, Any]) -> str:
    """The state of a run by its `run.json`: "lost" if the kernel that ran it is gone.

    On another host that cannot be told.
    """
    state = info["state"]
    if state != "running" or info["host"] != socket.gethostname():
        return str(state)
    try:
        process = psutil.Process(info["pid"])
        # To the second: it is reckoned from when the system began, which is corrected.
        is_same = abs(process.create_time() - info["pid_created"]) < 2.0
        is_there = is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return "lost"
    return "running" if is_there else "lost"


# ---- many of them ----


def load_run(name: str, folder: str | Path | None = None) -> Run:
    """A run from disk, by its name (the newest one with it) or that of its folder.

    `folder` has the runs: by default what LABKIT_RUNS names, or `runs` where we are.
    One that another kernel is running has what it has so far; its `refresh()` adds
    what came since. Needs neither cluster nor torch. Raises ValueError where there is
    no such run.
    """
    parent = runs_folder() if folder is None else Path(folder).absolute()
    return open_run(_find(name, parent)[-1])


def _find(name: str, parent: Path) -> list[Path]:
    """The folder of that name, or those of the runs with it, the newest last."""
    if not isinstance(name, str):
        raise ValueError(f"{shown(name)} is no run's name; give the name as a string")
    exact, is_folder = parent / name, False
    with contextlib.suppress(OSError):  # a path that is too long
        is_folder = is_run_name(name) and exact.is_dir()
    if is_folder:
        try:
            store.read_info(exact)
        except (OSError, ValueError) as error:
            raise ValueError(f"{exact} has no run that can be read: {error}") from None
        return [exact]
    stored = list(_stored(parent))
    found = [path for path, info in stored if info["name"] == name]
    if not found:
        names = list(dict.fromkeys(info["name"] for _, info in stored))
        have = ", ".join(names[-_MANY:]) or "none; %%dist_train STRATEGY makes one"
        more = f" and {len(names) - _MANY} older ones" if len(names) > _MANY else ""
        raise ValueError(
            f"there is no run {shown(name)} in {parent}; there are: {have}{more}"
        )
    return found


def _stored(parent: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The runs' folders and their `run.json`, oldest first; others are passed over.

    Of one that has a `run.json` which cannot be read a line says so, once.
    """
    found = []
    try:
        paths = sorted(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    except OSError as error:
        _warn(parent, f"no runs can be read: {error}")
        paths = []
    for path in paths:
        try:
            found.append((path, store.read_info(path)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            _warn(path, f"passed over a run that cannot be read: {error}")
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
            continue
        try:
            found.append(load_run(name))
        except ValueError as error:
            if not own:
                raise
            newest = ", ".join([*by_name][-_NAMES_SHOWN:])
            raise ValueError(f"{error}; of this lab: {newest}") from None
    return found


def list_runs(
    folder: str | Path | None = None,
    *,
    own: Sequence[Run] = (),
    strategy: str | None = None,
    state: str | None = None,
    last: int | None = None,
) -> pd.DataFrame:
    """One row a run on disk, and of `own`, newest last: when, strategy, ranks, state,
    steps, last loss, steps/s, seconds, bytes of the rank that has most, folder.

    `strategy` and `state` keep those that have them, `last` the newest so many.
    """
    if last is not None:
        check_count("last", last)
    if state is not None:
        check_choice("state", state, STATES)
    parent = runs_folder() if folder is None else Path(folder).absolute()
    rows = [_row(run.name, run.info, run.folder, summarize(run)) for run in own]
    here = {run.folder for run in own}
    for path, info in _stored(parent):
        if path not in here:
            try:
                # Of one that has not ended there is no summary.
                summary = info.get("summary") or summarize(open_run(path))
                with store.reading(path):
                    rows.append(_row(info["name"], info, path, summary))
            except ValueError as error:
                _warn(path, f"passed over a run that cannot be read: {error}")
    rows.sort(key=lambda row: (row["when"], row["folder"]))
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


def summarize(run: Run) -> dict[str, Any]:
    """What a list of runs tells of one."""
    memory = run.memory["total_peak"]
    return {
        "strategy": run.strategy,
        "ranks": run.world_size,
        "state": run.state,
        "steps": run.num_steps,
        "last_loss": run.last_loss,
        "steps_per_s": run.steps_per_s(),
        "seconds": run.elapsed(),
        "total_peak": memory.max() if len(memory) else None,
    }


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
    """Delete runs from disk, by name or by that of their folder; what was deleted.

    Raises ValueError, and deletes none, where there is no such run, one is running, a
    name is that of several, or a folder is a link.
    """
    parent = runs_folder() if folder is None else Path(folder).absolute()
    doomed: dict[Path, None] = {}
    for name in names:
        found = _find(name, parent)
        if len(found) > 1:
            folders = ", ".join(path.name for path in found)
            raise ValueError(
                f"{len(found)} runs are called {name}; name their folders: {folders}"
            )
        if state_of(store.read_info(found[0])) == "running":
            raise ValueError(f"{name} is running; stop it before you delete it")
        if found[0].is_symlink():
            raise ValueError(f"{found[0]} is a link; delete it by hand")
        doomed[found[0]] = None
    for path in doomed:
        shutil.rmtree(path)
    return list(doomed)
