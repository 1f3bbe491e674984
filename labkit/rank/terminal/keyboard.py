"""What is typed in the notebook for a rank: at `input`, and in a debugger."""

import bdb
import cmd
import gc
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from labkit import timeouts
from labkit.rank.terminal.debuggers import adapt_debuggers
from labkit.rank.terminal.debuggers import end_tracing
from labkit.rank.terminal.debuggers import forget_debuggers
from labkit.rank.terminal.debuggers import stay_in_cell
from labkit.records import COMMAND
from labkit.records import LAST_COMMAND
from labkit.records import LINE
from labkit.records import SECRET
from labkit.records import Question

NO_KEYBOARD = (
    "nobody can type here: with --background, in one of several trials at a time, or "
    "where a program runs the notebook. Print what you want to see, or look at the "
    "ranks' variables in another %%dist cell"
)
NOT_HERE = (
    "only the main thread of a rank can ask you, in its own process: not a thread, as "
    "that of a backward pass and its hooks on a GPU, nor a DataLoader's worker (debug "
    "a dataset with num_workers=0)"
)
FREED = (
    "labkit: when a cell has ended, its error's variables are freed. Write %pdb on in "
    "a %%dist cell, and run the cell again: the debugger opens where it fails"
)


class Keyboard:
    """Has `input`, `getpass`, `breakpoint()` and debuggers on this rank ask the user.

    A rank asks with a question to the notebook, and waits for the line that is typed.
    """

    def __init__(
        self,
        shell: Any,
        ask: Callable[[Question], None],
        was_interrupted: Callable[[], bool],
        flush: Callable[[], None],
    ) -> None:
        """`ask` sends a question, and `flush` what was printed before it;
        `was_interrupted` says whether the cell was."""
        self._shell = shell
        self._ask = ask
        self._was_interrupted = was_interrupted
        self._flush = flush
        self._can_type = self._looks_back = self._has_debugged = False
        self._numbers = itertools.count(1)
        # No SimpleQueue, which can miss its timeout: see `CellExecution.start_over`.
        self._lines: queue.Queue[tuple[int, str]] = queue.Queue()
        self._pid = os.getpid()
        self._refuse = shell.kernel.raw_input
        self._debug = shell.debugger
        shell.kernel.raw_input = self._read
        shell.kernel.getpass = self._read_secret
        shell.debugger = self._look_back
        sys.breakpointhook = self._break
        adapt_debuggers(shell)
        stay_in_cell()

    def begin_cell(self, *, can_type: bool) -> None:
        """A cell begins, in which the user can answer, or cannot."""
        self._can_type = can_type

    def end_code(self) -> None:
        """The cell's code has ended: what follows is for no debugger."""
        end_tracing()

    def end_cell(self) -> None:
        """A cell has ended: take away what a debugger has left for the next one."""
        if not self._has_debugged:
            return
        self._has_debugged = False
        forget_debuggers(self._shell)
        for name in ("__return__", "__exception__", "__pdb_convenience_variables"):
            self._shell.user_ns.pop(name, None)
        gc.collect()  # it holds frames, which hold it

    def take(self, number: int, line: str) -> None:
        """The user has answered the question of this number. In any thread."""
        self._lines.put((number, line))

    def _why_not(self) -> str:
        """Why this thread may not ask: an interrupt reaches the main one alone, and no
        line reaches a fork, as a DataLoader's worker is."""
        if not self._can_type:
            return NO_KEYBOARD
        is_main = threading.current_thread() is threading.main_thread()
        return "" if is_main and os.getpid() == self._pid else NOT_HERE

    def _read(self, prompt: Any = "") -> str:
        """Stands for `input`."""
        if self._why_not():
            return str(self._refuse(prompt))  # it raises
        text, caller = str(prompt), sys._getframe(1)
        debugger = caller.f_locals.get("self")
        is_loop = caller.f_code is cmd.Cmd.cmdloop.__code__
        if not (is_loop and isinstance(debugger, bdb.Bdb)):
            return self._answer(text, LINE)
        self._has_debugged = True
        if getattr(debugger, "commands_defining", False):  # for a breakpoint
            return self._answer(text, LINE)
        try:
            return self._answer(text, LAST_COMMAND if self._looks_back else COMMAND)
        except KeyboardInterrupt:  # a debugger would go on with the cell
            raise EOFError from None

    def _read_secret(self, prompt: Any = "Password: ", stream: Any = None) -> str:
        """Stands for `getpass.getpass`."""
        if self._why_not():
            return str(self._refuse(prompt))
        return self._answer(str(prompt), SECRET)

    def _answer(self, text: str, kind: str) -> str:
        """The line that is typed, without its end."""
        self._flush()
        if self._was_interrupted():  # and has caught that, as `interact` does
            raise EOFError("the cell was interrupted")
        number = next(self._numbers)
        self._ask(Question(number, text, kind))
        while True:
            try:
                answered, line = self._lines.get(timeout=timeouts.POLL_S)
            except queue.Empty:
                # Where an error is shown an interrupt raises nothing.
                if self._was_interrupted():
                    raise KeyboardInterrupt from None
                continue
            if answered == number:
                return line

    def _break(self, *args: Any, **kwargs: Any) -> None:
        """Stands for `breakpoint()`; the environment may name another hook, or none."""
        if os.environ.get("PYTHONBREAKPOINT"):
            sys.__breakpointhook__(*args, **kwargs)
            return
        frame = sys._getframe(1)
        if not (why := self._why_not()):
            if (header := kwargs.get("header")) is not None:
                print(header)
            self._shell.debugger_cls().set_trace(frame)
            return
        print(
            f"labkit: breakpoint() in {frame.f_code.co_name}, line {frame.f_lineno}, "
            f"is skipped: {why}",
            file=sys.stderr,
        )

    def _look_back(self, force: bool = False) -> None:
        """Stands for IPython's post-mortem debugger: of `%debug`, or `%pdb on`."""
        if self._was_interrupted():
            return
        if why := self._why_not():
            print(f"labkit: no debugger opens here: {why}", file=sys.stderr)
        elif getattr(sys, "last_traceback", None) is None:
            print(FREED, file=sys.stderr)
        else:
            self._looks_back = True
            try:
                self._debug(force=force)
            finally:
                self._looks_back = False
