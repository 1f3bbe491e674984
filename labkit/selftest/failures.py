"""Checks of what fails, each caused for real."""

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from labkit import timeouts
from labkit.lab import Lab
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.execution.errors import Interrupted
from labkit.notebook.execution.errors import RankError
from labkit.selftest.bench import Bench
from labkit.selftest.bench import CheckFailedError
from labkit.selftest.bench import Measured
from labkit.selftest.training import DATA
from labkit.selftest.training import LOOP
from labkit.selftest.training import train

TIMEOUT_S = 3.0
GETS_THERE_S = 20.0
"""Every rank has come to the collective that cannot complete."""

HANG = """
import pathlib
import time
pathlib.Path({folder!r}, f"{{rank}}").touch()
if rank == 0:
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if total.is_cuda:
        torch.cuda.synchronize()
else:
    time.sleep(3600)
"""
RAISE = """
if rank == world_size - 1:
    raise ValueError("on purpose")
dist.all_reduce(torch.ones(1, device=device))
"""
KILL = """
import os
import signal
if rank == world_size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1, device=device))
"""
TOO_LARGE = """
if rank == 0:
    labkit_large = torch.empty(2**50, device=device)
dist.all_reduce(torch.ones(1, device=device))
"""
ASSERT_ON_DEVICE = """
if rank == 0:
    torch.zeros(4, device=device)[torch.tensor([9], device=device)]
    torch.cuda.synchronize()
"""


def rank_raises(bench: Bench) -> Measured:
    """A rank that raises frees the others, and is the one that is named."""
    last = bench.lab.world_size - 1
    with bench.keeping_all():
        began = time.monotonic()
        error = _rank_error(bench.lab, RAISE)
        seconds = time.monotonic() - began
        if error.rank != last or "on purpose" not in str(error):
            raise CheckFailedError(f"another error than that of rank {last}: {error}")
        _check_not_restarted(error)
    return Measured(f"the others were free after {seconds:.1f} s, all variables kept")


def out_of_memory(bench: Bench) -> Measured:
    """An allocation that cannot be says what the rank holds, and costs nothing."""
    with bench.keeping_all():
        error = _rank_error(bench.lab, TOO_LARGE)
        if error.rank != 0 or "Memory of rank 0" not in str(error):
            raise CheckFailedError(f"no report of what rank 0 held: {error}")
        _check_not_restarted(error)
    return Measured("refused with a table of what the rank held, all variables kept")


def killed(bench: Bench) -> Measured:
    """A rank that dies ends the cell, and comes back."""
    lab = bench.lab
    last = lab.world_size - 1
    with bench.keeping_all(lost=last):
        began = time.monotonic()
        error = _rank_error(lab, KILL)
        ended = time.monotonic()
        if error.rank != last or "SIGKILL" not in str(error):
            raise CheckFailedError(f"rank {last} was killed, and not named: {error}")
        if (started := lab.restart()) != [last]:
            raise CheckFailedError(
                f"the ranks {started} were restarted, and not {last}"
            )
        seconds = time.monotonic() - ended
    return Measured(
        f"noticed after {ended - began:.1f} s, back after {seconds:.1f} s, the others "
        "kept their variables"
    )


def timed_out(bench: Bench) -> Measured:
    """`--timeout` ends a collective that cannot complete."""
    lab = bench.lab
    with bench.keeping_all(), _folder(bench) as folder:
        began = time.monotonic()
        try:
            lab.run(HANG.format(folder=folder), timeout=TIMEOUT_S, hang_after=0)
        except CellTimeoutError as error:
            seconds = time.monotonic() - began
            _check_not_restarted(error)
        else:
            raise CheckFailedError("a collective without partners has completed")
    return Measured(f"over after {seconds:.1f} s of {TIMEOUT_S:g}, all variables kept")


def timed_out_sharded(bench: Bench) -> Measured:
    """The same with the communicators of ZeRO and HSDP, which are idle meanwhile."""
    for name in ("zero1", "hsdp"):
        train(bench, name, DATA + LOOP)
    return timed_out(bench)


def interrupted(bench: Bench) -> Measured:
    """An interrupt, as of the stop button, ends a collective that cannot complete."""
    lab = bench.lab
    sent: list[float] = []

    def interrupt(folder: Path) -> None:
        deadline = time.monotonic() + GETS_THERE_S
        while time.monotonic() < deadline and len(list(folder.iterdir())) < (
            lab.world_size
        ):
            time.sleep(timeouts.POLL_S)
        # All are in the cell; rank 0 comes to the collective a moment later.
        while time.monotonic() < deadline and "all_reduce" not in bench.where():
            time.sleep(timeouts.POLL_S)
        sent.append(time.monotonic())
        execution = lab.runs[-1].execution
        if execution is not None:
            execution.interrupt()

    with bench.keeping_all(), _folder(bench) as folder:
        thread = threading.Thread(target=interrupt, args=(Path(folder),), daemon=True)
        thread.start()
        try:
            lab.train("raw", HANG.format(folder=folder), live=False, hang_after=0)
        except Interrupted as error:
            seconds = time.monotonic() - sent[0]
            _check_not_restarted(error)
        else:
            raise CheckFailedError("a collective without partners has completed")
        finally:
            thread.join(GETS_THERE_S)
    return Measured(f"over after {seconds:.1f} s, all variables kept")


def killed_while_restarting(bench: Bench) -> Measured:
    """A rank that dies while the group forms leaves a lab that can be restarted."""
    lab = bench.lab
    last = lab.world_size - 1
    with bench.keeping_all(lost=last):
        _rank_error(lab, KILL)
        former = lab.status()["pid"].tolist()[last]

        def kill_the_next() -> None:
            deadline = time.monotonic() + GETS_THERE_S
            while time.monotonic() < deadline:
                pid = lab.status()["pid"].tolist()[last]
                if pid != former:
                    with contextlib.suppress(psutil.Error):
                        process = psutil.Process(pid)
                        process.kill()
                        process.wait(GETS_THERE_S)
                    return

        thread = threading.Thread(target=kill_the_next, daemon=True)
        thread.start()
        with contextlib.suppress(RuntimeError):  # it may have been quicker
            lab.restart()
        thread.join(GETS_THERE_S)
        began = time.monotonic()
        lab.restart()
        seconds = time.monotonic() - began
    return Measured(f"back after another {seconds:.1f} s")


def asserted_on_device(bench: Bench) -> Measured:
    """A device-side assert, after which CUDA calls of the process fail, costs one
    rank."""
    lab = bench.lab
    with bench.keeping_all(lost=0):
        _rank_error(lab, ASSERT_ON_DEVICE)
        lab.restart()
    return Measured("rank 0 came back, the others kept their variables")


def _rank_error(lab: Lab, code: str) -> RankError:
    """What `code`, in which a rank fails, ends with."""
    try:
        lab.run(code, hang_after=0)
    except RankError as error:
        return error
    raise CheckFailedError("the cell of a rank that failed has ended without an error")


def _check_not_restarted(error: RankError | CellTimeoutError | Interrupted) -> None:
    for outcome in error.outcomes:
        if outcome.status == "restarted":
            raise CheckFailedError(f"rank {outcome.rank} did not stop and was killed")


@contextlib.contextmanager
def _folder(bench: Bench) -> Iterator[str]:
    """A new one, in which ranks say that they are there."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        yield folder
