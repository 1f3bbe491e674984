"""What is typed in the notebook for a rank: at `input`, and in a debugger."""

import bdb
import itertools
import os
import queue
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from labkit import timeouts
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
FREED = (
    "labkit: when a cell has ended, its error's variables are freed. Write %pdb on in "
    "a %%dist cell, and run the cell again: the debugger opens where it fails"
)
_OF_DEBUGGER = re.compile(r"\s*(ipdb>|\(+pdb)", re.IGNORECASE)


class Keyboard:
    """Has `input`, `getpass`, `breakpoint()` and debuggers on this rank ask the user.

    A rank asks with a question to the notebook, and waits for the line that is typed.
    """

    def __init__(
        self,
        shell: Any,
        ask: Callable[[Question], None],
        was_interrupted: Callable[[], bool],
    ) -> None:
        """`ask` sends a question; `was_interrupted` says whether the cell was."""
        self._shell = shell
        self._ask = ask
        self._was_interrupted = was_interrupted
        self._can_type = self._looks_back = False
        self._numbers = itertools.count(1)
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._refuse = shell.kernel.raw_input
        self._debug = shell.debugger
        shell.kernel.raw_input = self._read
        shell.kernel.getpass = self._read_secret
        shell.debugger = self._look_back
        sys.breakpointhook = self._break

    def begin_cell(self, *, can_type: bool) -> None:
        """A cell begins, in which the user can answer, or cannot."""
        self._can_type = can_type

    def end_cell(self) -> None:
        """A cell has ended: take away what a debugger has left for the next one."""
        if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
            sys.settrace(None)
        for name in ("__return__", "__exception__"):
            self._shell.user_ns.pop(name, None)

    def take(self, number: int, line: str) -> None:
        """The user has answered the question of this number. In any thread."""
        self._lines.put((number, line))

    @property
    def _is_there(self) -> bool:
        """Whether this thread may ask: an interrupt reaches the main one alone, and no
        line reaches a fork, as a DataLoader's worker is."""
        is_main = threading.current_thread() is threading.main_thread()
        return self._can_type and is_main and os.getpid() == self._pid

    def _read(self, prompt: Any = "") -> str:
        """Stands for `input`."""
        if not self._is_there:
            return str(self._refuse(prompt))  # it raises
        text = str(prompt)
        if not _OF_DEBUGGER.match(text):
            return self._answer(text, LINE)
        try:
            return self._answer(text, LAST_COMMAND if self._looks_back else COMMAND)
        except KeyboardInterrupt:  # a debugger would go on with the cell
            raise EOFError from None

    def _read_secret(self, prompt: Any = "Password: ", stream: Any = None) -> str:
        """Stands for `getpass.getpass`."""
        if not self._is_there:
            return str(self._refuse(prompt))
        return self._answer(str(prompt), SECRET)

    def _answer(self, text: str, kind: str) -> str:
        """The line that is typed, without its end."""
        sys.stdout.flush()
        sys.stderr.flush()
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
        """Stands for `breakpoint()`."""
        frame = sys._getframe(1)
        if self._is_there:
            # Its own handler for Ctrl-C would take the place of labkit's.
            self._shell.debugger_cls(nosigint=True).set_trace(frame)
            return
        print(
            f"labkit: breakpoint() in {frame.f_code.co_name}, line {frame.f_lineno}, "
            f"is skipped: {NO_KEYBOARD}",
            file=sys.stderr,
        )

    def _look_back(self, force: bool = False) -> None:
        """Stands for IPython's post-mortem debugger: of `%debug`, or `%pdb on`."""
        if self._was_interrupted():
            return
        if not self._is_there:
            print(f"labkit: no debugger opens here: {NO_KEYBOARD}", file=sys.stderr)
        elif getattr(sys, "last_traceback", None) is None:
            print(FREED, file=sys.stderr)
        else:
            self._looks_back = True
            try:
                self._debug(force=force)
            finally:
                self._looks_back = False
