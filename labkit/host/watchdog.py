"""Ends a lab's processes when its notebook kernel is gone, however it went.

Run as a process of its own: `python watchdog.py FOLDER`, the token in its environment,
its stdin a pipe from the kernel. It imports nothing of labkit's, so that it starts at
once and stays small.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time

import psutil

TOKEN_VARIABLE = "LABKIT_LAB"
"""Set in the environment of every process that a lab starts, and so in those that
they start: it tells our processes from all others, by what only we could know."""

WATCHED_VARIABLE = "LABKIT_WATCHED_LAB"
"""The token of the lab that this process is to end."""

FORK_SERVER = "labkit.rank.engine.fork_server"
"""Forks the engines, and ends after a SIGTERM once it has reaped them."""

TERM_SECONDS = 2.0
TIDY_SECONDS = 20.0
"""torch_shm_manager removes its folder 2 s after the last of its users has gone; on
busy cores that may be late, and one that is killed leaves it."""


def find_processes(token: str) -> list[psutil.Process]:
    """The processes of the lab with this token."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(TOKEN_VARIABLE) == token
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone, or another user's
    return found


def end_processes(token: str) -> None:
    """Terminate, then kill, until none is left; those that tidy up come last.

    An ended process counts as gone before its parent has reaped it: an orphan's is the
    system's first process, which may take a second.
    """
    others = [each for each in find_processes(token) if not is_tidying(each)]
    for process in others:
        _send(process, signal.SIGTERM)
    kill_at = time.monotonic() + TERM_SECONDS
    while any(map(is_running, others)) and time.monotonic() < kill_at:
        time.sleep(0.02)
    kill_all_at = time.monotonic() + TIDY_SECONDS
    pause = 0.02
    while processes := find_processes(token):
        servers = {each.pid for each in processes if FORK_SERVER in words_of(each)}
        for process in processes:
            # An engine's command line is that of the server from which it was forked.
            reaps = process.pid in servers and parent_of(process) not in servers
            is_spared = reaps or is_tidying(process)
            if time.monotonic() > kill_all_at or not is_spared:
                _send(process, signal.SIGKILL)
        time.sleep(pause)
        pause = min(1.2 * pause, 1.0)  # one that hangs in a driver may never end


def is_running(process: psutil.Process) -> bool:
    """Whether a process, which need not be this one's child, has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_tidying(process: psutil.Process) -> bool:
    """Whether a process is there to remove shared memory once its users are gone."""
    return any(
        "torch_shm_manager" in word or "resource_tracker" in word
        for word in words_of(process)
    )


def words_of(process: psutil.Process) -> list[str]:
    """The name of a process, and its command line; [] once it has ended."""
    try:
        return [process.name(), *process.cmdline()]
    except psutil.Error:
        return []


def parent_of(process: psutil.Process) -> int:
    """The process id of its parent; 0 once it has ended."""
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _send(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signum)  # psutil compares the creation time first


def clean_up(token: str, folder: str) -> None:
    """End the processes of the lab with this token and remove its folder."""
    end_processes(token)
    shutil.rmtree(folder, ignore_errors=True)


def main(token: str, folder: str) -> None:
    """Wait until the kernel writes to the pipe, closes it, or dies; then leave nothing
    behind."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    parent = os.getppid()
    # The pipe alone would not do: a child that the kernel forked may hold it open.
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], 0.5)[0]:
            break
    clean_up(token, folder)


if __name__ == "__main__":
    main(os.environ[WATCHED_VARIABLE], *sys.argv[1:])
