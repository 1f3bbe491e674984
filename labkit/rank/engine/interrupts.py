"""Stops a running cell: between two of its instructions, or out of a collective."""

import _thread
import asyncio
import contextlib
import functools
import pdb
import re
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Coroutine
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from labkit import timeouts
from labkit.compat.ipython import no_running_loop
from labkit.rank.group.process_group import RankProcessGroup
from labkit.rank.scripts.program import ScriptProgram
from labkit.rank.steps.stop_point import Stopped

_OF_LOOPS = (str(Path(asyncio.__file__).parent), selectors.__file__)


class Phase(Enum):
    """Where the engine is with a cell."""

    IDLE = "no cell, or before its code"
    RUNNING = "its code runs: the only phase in which an interrupt is raised"
    ENDING = "its code has ended, its outcome is not yet published"


class CellInterrupts:
    """Interrupts of one engine's cells.

    They arrive on the engine's control thread, which is free while the main thread
    sits in a collective.
    """

    def __init__(
        self,
        group: RankProcessGroup,
        refusal: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        """`refusal` gives what to raise in the cell in place of `Stopped`, if any."""
        self._group = group
        self._refusal = refusal
        self._phase = Phase.IDLE
        self._lock = threading.Lock()
        """Guards the phase and the number."""
        self._number = 0
        """Of the cell: a request for the one before may come when it has begun."""
        self._seen = threading.Event()
        """Set once this cell was interrupted."""
        self._handled = threading.Event()
        """Set once Python code has run since the last signal."""
        self._signalled_at = 0.0
        self._stopping_since = 0.0
        self._cancel: Callable[[], object] = lambda: None
        """Ends what a cell awaits."""
        # Its own, which a debugger installs at `c`, would ask the user once more.
        pdb.Pdb.sigint_handler = self._on_sigint  # type: ignore[method-assign, assignment]
        self._sigterm_when_idle = signal.getsignal(signal.SIGTERM)
        self._show_unraisable = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable

    @property
    def is_running(self) -> bool:
        return self._phase is Phase.RUNNING

    @property
    def number(self) -> int:
        """That of the cell, or of the last one if none runs."""
        return self._number

    def was_interrupted(self) -> bool:
        """Whether this cell was, or the last one if none runs."""
        return self._seen.is_set()

    # ---- phases of a cell, in the main thread ----

    def begin(self, number: int) -> None:
        """A cell begins; its code comes later, or not at all."""
        with self._lock:
            self._number = number
        self._seen.clear()

    def begin_code(self) -> None:
        """The cell's code is about to run."""
        self._enter(Phase.RUNNING)
        signal.signal(signal.SIGINT, self._on_sigint)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        if signal.getsignal(signal.SIGTERM) == self._sigterm_when_idle:
            # ipykernel's waits for the end of the cell; within one, end the process.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_code(self) -> None:
        """The cell's code has ended: nothing is raised in what follows."""
        self._enter(Phase.ENDING)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._sigterm_when_idle)

    def end(self) -> None:
        """Nothing of the cell is left that might wait for other ranks."""
        self._enter(Phase.IDLE)

    def run_coroutine(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]
    ) -> Any:
        """Run a cell that awaits to its end, as if it were plain code.

        On a loop of our own: an interrupt reaches a cell that awaits like any other.
        """
        task = loop.create_task(coroutine)
        self._cancel = functools.partial(loop.call_soon_threadsafe, task.cancel)
        with no_running_loop():
            while True:
                try:
                    return loop.run_until_complete(task)
                except KeyboardInterrupt:  # in another task of the cell's
                    if task.done():
                        raise
                    task.cancel()

    def _enter(self, phase: Phase) -> None:
        with self._lock:
            self._phase = phase

    def _on_sigint(self, signum: int, frame: Any) -> None:
        self._handled.set()
        refusal = self._refusal()
        if refusal is None:
            self._seen.set()
        if not self.is_running:
            return
        is_in_cell = is_script = awaits = is_in_ipython = False
        innermost = frame
        is_patient = time.monotonic() - self._stopping_since < timeouts.IMPORT_S
        while frame is not None:
            # A cell that has raised already is not to raise again while it is shown.
            if frame.f_code.co_name == "showtraceback":
                return
            # A module that is imported in part would stay broken: the next signal
            # will do, unless it takes too long.
            in_import = frame.f_code.co_filename == "<frozen importlib._bootstrap>"
            # And what a script has changed would not be put back.
            is_script |= frame.f_code is ScriptProgram.run.__code__
            puts_back = (
                frame.f_code is ScriptProgram.__call__.__code__ and not is_script
            )
            if (in_import or puts_back) and is_patient:
                self._signalled_at = 0.0
                return
            is_in_cell |= frame.f_code.co_name == "run_code"
            is_in_ipython |= frame.f_code.co_name == "run_cell_async"
            awaits |= frame.f_code is CellInterrupts.run_coroutine.__code__
            frame = frame.f_back
        if awaits and not is_in_ipython:
            is_in_loop = innermost.f_code.co_filename.startswith(_OF_LOOPS)
            if is_in_loop and refusal is None:
                # What is raised in the loop itself may cost it a step of the task.
                self._cancel()
                return
            is_in_cell = True  # in another task of the cell's
        if is_in_cell:  # and not in what IPython does before and after it
            raise refusal or Stopped

    def _on_unraisable(self, unraisable: Any) -> None:
        """Python drops what is raised where nobody can catch it, as in a generator
        that a `break` has left: there an interrupt has not stopped the cell."""
        error = unraisable.exc_value
        if not isinstance(error, Stopped) and (
            error is None or error is not self._refusal()
        ):
            self._show_unraisable(unraisable)
            return
        again = threading.Timer(timeouts.POLL_S, self._signal_again, [self._number])
        again.daemon = True
        again.start()

    def _signal_again(self, number: int) -> None:
        with self._lock:
            if number == self._number and self.is_running:
                self._signal_main_thread()

    # ---- in the control thread ----

    def request(self, number: int, release_after_s: float) -> None:
        """Interrupt this cell; does not keep the control thread waiting."""
        threading.Thread(
            target=self._interrupt, args=(number, release_after_s), daemon=True
        ).start()

    def _interrupt(self, number: int, release_after_s: float) -> None:
        """Stop the running cell; if it sits in a collective, free it from that.

        Python code sees the signal at its next instruction, and so does a blocking
        system call. A main thread that has not seen it after `release_after_s` is
        in C++, waiting for ranks that will not come.
        """
        with self._lock:
            if number != self._number:
                return
            if self._phase is Phase.ENDING and self._group.backend == "nccl":
                # The code has ended; what it left on the GPU may wait for other ranks.
                self._group.release()
                return
            if not self.is_running or not self._is_due():
                return
            self._signal_main_thread()
        if self._handled.wait(release_after_s):
            return
        if number == self._number and self.is_running:
            self._group.release()

    def _is_due(self) -> bool:
        """Whether the cell has not been interrupted yet, or ignored that."""
        waits_s = time.monotonic() - self._signalled_at
        return not self._seen.is_set() or waits_s >= timeouts.SIGNAL_AGAIN_S

    def _signal_main_thread(self) -> None:
        now = time.monotonic()
        if not self._seen.is_set():
            self._stopping_since = now
        self._signalled_at = now
        self._handled.clear()
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)
        if ignores_sigint():
            interrupt_command()
            _thread.interrupt_main()  # its handler runs once the command has ended


def ignores_sigint() -> bool:
    """Whether a SIGINT does nothing at the moment: C's `system`, which `os.system`
    calls, leaves it to the command that it waits for, to which a terminal sends it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # Linux has it
        return False
    found = re.search(r"SigIgn:\t(\w+)", status)
    return found is not None and bool(int(found[1], 16) >> (signal.SIGINT - 1) & 1)


def interrupt_command() -> None:
    """Send SIGINT to the command of `os.system`, and all that it runs."""
    for shell in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            # Python's own shells are "/bin/sh": of `subprocess`, perhaps in a thread.
            if shell.cmdline()[:2] == ["sh", "-c"]:
                for each in (shell, *shell.children(recursive=True)):
                    each.send_signal(signal.SIGINT)
