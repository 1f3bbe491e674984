"""A run on disk: kept as it runs, and opened again."""

import contextlib
import functools
import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from labkit.checks import UserError
from labkit.checks import absolute
from labkit.json_files import parse
from labkit.notebook.history.collector import Collector
from labkit.notebook.kernel.output import say
from labkit.notebook.kernel.output import working_directory
from labkit.notebook.runs import run_files
from labkit.notebook.runs.progress import status_line
from labkit.notebook.runs.record import Restart
from labkit.notebook.runs.run import Run
from labkit.options import check_values
from labkit.records import BEST_FOLDER
from labkit.records import BLOCK_NOTE
from labkit.records import COMPONENTS
from labkit.records import PROFILE_NOTE
from labkit.records import Averages
from labkit.records import CheckpointPlan
from labkit.records import Measurement
from labkit.records import Outcome
from labkit.records import Progress
from labkit.records import shorten
from labkit.train_options import TrainOptions

FOLDER_VARIABLE = "LABKIT_RUNS"
"""The environment variable that names the folder of all runs."""

OUTCOME_CHARACTERS = 2**18
"""Of each text about how a run ended, of all its ranks: a cell may raise an error of
any length."""
_VERSIONED = ("torch", "labkit", "deepspeed")
_warned: set[Path] = set()


def runs_folder() -> Path:
    """The folder of all runs: what LABKIT_RUNS names, or `runs` where we are."""
    return absolute(os.environ.get(FOLDER_VARIABLE) or "runs")


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
    pids: Sequence[int] = (),
    command: str | None = None,
    ranks_per_host: Sequence[int] = (),
) -> None:
    """Make a run's folder, and write what is known of it before it runs.

    Where that cannot be written the run continues without it, and a line says so once.
    """
    run.info = {
        "began": time.time(),
        "seed": seed,
        "config": dict(config or {}),
        "devices": list(devices),
        "ranks_per_host": list(ranks_per_host),
        "backend": backend,
        "versions": dict(versions(tuple(pids))),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_created": psutil.Process().create_time(),
    }
    if command is not None:
        run.info["command"] = command
    if checkpoints is not None:
        run.info["checkpoints"] = asdict(checkpoints)
        run.info["resumed_from"] = resumed_from
        run.info["restarts"] = []
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(run.info["began"]))
    try:
        run.folder = _make_folder(runs_folder(), f"{when}-{run.name}")
        run_files.write_info(run.folder, run_info(run))
    except (OSError, UserError) as error:
        run.folder = None
        warn_once(
            Path(working_directory() or "", os.environ.get(FOLDER_VARIABLE) or "runs"),
            f"{run.name} is not kept on disk: {error}. It runs without; for later runs "
            f"set {FOLDER_VARIABLE} to a folder that can be written to",
        )


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
    with _going_on_without(run):
        run_files.write_info(run.folder, run_info(run))


@contextlib.contextmanager
def _going_on_without(run: Run) -> Iterator[None]:
    """What cannot be written of a run is said, and no more."""
    try:
        yield
    except OSError as error:
        assert run.folder is not None
        warn_once(
            run.folder,
            f"the newest state of {run.name} cannot be written to {run.folder}: "
            f"{error}. The run continues; what is on disk is older",
        )


def restart(run: Run, outcomes: Sequence[Outcome], restarted: Restart) -> None:
    """A run resumes after ranks died with these outcomes: keep its records until then,
    and write the next ones to a folder of their own."""
    for outcome in outcomes:
        _take_outcome(run, outcome)
    run.collector.restart(restarted.step, restarted.seconds)
    # What could not be recorded, the next attempt may record, or say so itself.
    run.collector.notes = [
        each
        for each in run.collector.notes
        if not each.startswith((PROFILE_NOTE, BLOCK_NOTE))
    ]
    run.info["restarts"].append(asdict(restarted))
    if run.folder is None:
        return
    with _going_on_without(run):
        journals_of(run).mkdir()
    save(run)


def journals_of(run: Run) -> Path:
    """Where its ranks keep their records now."""
    assert run.folder is not None
    return run_files.journal_folder(run.folder, run.collector.num_restarts)


def end(
    run: Run,
    state: str,
    outcomes: Sequence[Outcome],
    *,
    seconds: float | None = None,
) -> None:
    """A run has ended so on its ranks, now or after so many seconds: write its records,
    then all that is known.

    Records that only a rank's journal has are taken in before.
    """
    for outcome in outcomes:
        _take_outcome(run, outcome)
    run.end(state, seconds=seconds)
    run.info["outcomes"] = [
        {
            key: shorten(value, OUTCOME_CHARACTERS // len(outcomes))
            if isinstance(value, str)
            else value
            for key, value in vars(outcome).items()
            if key != "traceback"
        }
        for outcome in sorted(outcomes, key=lambda each: each.rank)
    ]
    run.info["summary"] = summarize(run)
    if run.folder is None:
        return
    for number in range(run.collector.num_restarts + 1):  # no rank reads it any more
        best = run_files.journal_folder(run.folder, number) / BEST_FOLDER
        shutil.rmtree(best, ignore_errors=True)
    try:
        run_files.write_records(run.folder, run.collector)
    except OSError as error:
        warn_once(
            run.folder,
            f"the records of {run.name} cannot be written to {run.folder}: {error}. "
            "This kernel keeps them in memory until it ends",
        )
    save(run)


def _take_outcome(run: Run, outcome: Outcome) -> None:
    collector, rank = run.collector, outcome.rank
    if rank in collector.servers:  # which keep no records
        return
    has_died = outcome.status in ("died", "restarted")
    if run.folder is not None and (
        has_died
        or collector.lost[rank]
        or collector.num_received[rank] < outcome.num_records
    ):
        run_files.read_journal(run.folder, rank, collector)
    if not has_died:
        collector.finish(rank, outcome.num_records)
    if collector.lost[rank]:
        say(
            f"{collector.lost[rank]:,} records of rank {rank} are lost: they did not "
            "reach the notebook, and are not in the rank's journal on disk"
        )
    if outcome.num_not_on_disk:
        say(
            f"rank {rank} had {outcome.num_not_on_disk:,} of its "
            f"{outcome.num_records:,} records in memory alone while it ran: "
            f"{outcome.disk_error}"
        )


def warn_once(folder: Path, text: str) -> None:
    """Say it on stderr, but once for each folder."""
    if folder not in _warned:
        _warned.add(folder)
        say(text)


def summarize(run: Run) -> dict[str, Any]:
    """The row of a run in a list of runs."""
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


@functools.lru_cache(1)  # to read them takes milliseconds
def versions(pids: tuple[int, ...]) -> Mapping[str, str]:
    """Of Python and the packages that a run on these processes depends on; "" for what
    is not there."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


# ---- to and from run.json ----


def run_info(run: Run) -> dict[str, Any]:
    """All of a run except its records, for `run_files.write_info`."""
    collector = run.collector
    return {
        "name": run.name,
        "strategy": run.strategy,
        "state": run.state,
        "seconds": run.elapsed(),
        "world_size": run.world_size,
        "ranks": collector.ranks,
        "servers": collector.servers,
        "options": run.options.for_message(),
        "log_scale": run.log_scale,
        **run.info,
        "code": run.code,
        "steps": collector.steps,
        "progress": {rank: asdict(p) for rank, p in collector.progress.items()},
        "lost": collector.lost,
        "mismatches": run.mismatches,
        "notes": run.notes,
        "averages": {rank: asdict(a) for rank, a in collector.averages.items()},
        "measurements": {
            rank: [asdict(each) for each in measured]
            for rank, measured in collector.measurements.items()
        },
    }


def open_run(folder: Path) -> Run:
    """The run in `folder`. ValueError where there is none to read."""
    with run_files.reading(folder):
        info = run_files.read_info(folder)
        options = parse(TrainOptions, info["options"])
        check_values(options)
        servers = parse(list[int], info.get("servers", []), "servers")
        first_step = parse(int | None, info.get("resumed_from"), "resumed_from")
        run = Run(
            info["name"],
            info["strategy"],
            parse(str, info["code"], "code"),
            Collector(info["ranks"], first_step or 0, servers=servers),
            options,
            folder=folder,
            log_scale=parse(bool, info.get("log_scale", False), "log_scale"),
            on_refresh=refresh,
        )
        take(run, info)
    return run


def refresh(run: Run) -> None:
    """Bring a run from disk up to date, which another kernel may still run."""
    assert run.folder is not None
    with run_files.reading(run.folder):
        take(run, run_files.read_info(run.folder))


def take(run: Run, info: dict[str, Any]) -> None:
    """Bring a run from disk up to date with its `run.json` and its records."""
    assert run.folder is not None
    collector = run.collector
    state = state_of(info)
    has_ended = state not in ("running", "lost")
    ranks = collector.ranks
    restarts = parse(list[Restart], info.get("restarts", []), "restarts")
    if len(restarts) * len(ranks) > run_files.MAX_RESTARTED:
        raise ValueError(f"{len(ranks)} ranks with {len(restarts)} restarts")
    measurements = {
        rank: parse(list[Measurement], info["measurements"][str(rank)], "measurements")
        for rank in (*ranks, *collector.servers)
    }
    for each in chain.from_iterable(measurements.values()):
        if missing := set(COMPONENTS) - set(each.memory):
            raise ValueError(f"it has no {min(missing)}")
        if not each.moments.is_whole:
            raise ValueError("the moments of a step are not as many as their bytes")
    progress = {
        rank: parse(Progress, info["progress"][str(rank)], "progress") for rank in ranks
    }
    counts = {
        name: {rank: parse(int, info[name][str(rank)], name) for rank in ranks}
        for name in ("steps", "lost")
    }
    notes = parse(list[str], info.get("notes", []), "notes")
    mismatches = parse(list[str], info["mismatches"], "mismatches")
    parse(list[Outcome], info.get("outcomes", []), "outcomes")
    seconds = parse(float, info["seconds"], "seconds")
    run_files.read_records(
        run.folder,
        collector,
        restarts=[(each.step, each.seconds) for each in restarts],
        is_growing=state == "running",
    )
    collector.notes = notes
    collector.measurements = measurements
    averages = parse(dict[str, Averages], info.get("averages", {}), "averages")
    collector.averages = {
        rank: averages[str(rank)] for rank in ranks if str(rank) in averages
    }
    if has_ended:
        collector.progress = progress
        collector.steps, collector.lost = counts["steps"], counts["lost"]
    if state == "lost":
        ends = [collector.records(rank)["seconds"] for rank in ranks]
        seconds = max([seconds, *(float(e[-1]) for e in ends if len(e))])
    other = info.keys() - run_info(Run("", "", "", Collector([]))).keys()
    run.catch_up(
        state,
        seconds=seconds,
        info={key: info[key] for key in info if key in other},
        mismatches=mismatches,
    )
    # What follows from it by formulas: numbers that cannot be are found out here.
    _ = run.theory, run.memory, run.comm, status_line(run)


def state_of(info: Mapping[str, Any]) -> str:
    """The state of a run by its `run.json`: "lost" if the kernel that ran it is gone.

    On another host that is not known.
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
