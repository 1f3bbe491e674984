"""Python's debuggers on a rank: they stop in the user's code, and leave nothing."""

import bdb
import contextlib
import pdb
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from labkit.compat.ipython import drop_debuggers

_MACHINERY = (
    *("IPython.", "ipykernel.", "traitlets.", "labkit.rank."),
    *("asyncio.", "selectors.", "contextlib.", "codeop.", "ast."),
)
"""The modules below a cell, and between two of its statements."""


def adapt_debuggers(shell: Any) -> None:
    """Have `n` and `s` go from one statement of a cell to the next.

    IPython runs each on its own: they would lead through IPython, and at the end of
    the cell through labkit.
    """
    run_code = shell.run_code.__func__.__code__
    call, end = pdb.Pdb.user_call, pdb.Pdb.user_return

    def is_statement(frame: FrameType) -> bool:
        return frame.f_back is not None and frame.f_back.f_code is run_code

    def user_call(self: Any, frame: FrameType, arguments: Any) -> None:
        if not is_statement(frame):
            call(self, frame, arguments)

    def user_return(self: Any, frame: FrameType, value: Any) -> None:
        if not is_statement(frame):
            end(self, frame, value)
        elif self.stopframe is not frame:  # as it is after `n`
            end(self, frame, value)
            frame.f_globals.pop("__return__", None)  # of the next one it would be, too

    for each in shell.debugger_cls.__mro__:
        if "stop_here" in vars(each):
            each.stop_here = _but_in_machinery(each.stop_here)
    pdb.Pdb.user_call = user_call  # type: ignore[method-assign, assignment]
    pdb.Pdb.user_return = user_return  # type: ignore[method-assign, assignment]


def stay_in_cell() -> None:
    """Have no command end the cell but `q`: `exit()` leads back from `interact` to the
    prompt, and `run` and `restart` say that a cell cannot start over. Nor does an error
    in that console fail the cell: what IPython shows is one of the cell's."""
    interact = pdb.Pdb.do_interact

    def do_interact(self: Any, argument: str) -> None:
        show, sys.excepthook = sys.excepthook, sys.__excepthook__
        try:
            with contextlib.suppress(SystemExit):  # as Python does from 3.13 on
                interact(self, argument)
        finally:
            sys.excepthook = show

    def do_run(self: Any, argument: str) -> None:
        self.error("a cell cannot start over here: end it with q, and run it again")

    pdb.Pdb.do_interact = do_interact  # type: ignore[assignment]
    pdb.Pdb.do_run = do_run  # type: ignore[assignment]
    pdb.Pdb.do_restart = do_run  # type: ignore[assignment]


def _but_in_machinery(stop_here: Callable[..., bool]) -> Callable[..., bool]:
    def stops(self: Any, frame: FrameType) -> bool:
        module = f"{frame.f_globals.get('__name__')}."
        return not module.startswith(_MACHINERY) and stop_here(self, frame)

    return stops


def end_tracing() -> None:
    """What follows in this thread is not the user's."""
    if _is_debugger(sys.gettrace()):
        sys.settrace(None)


def forget_debuggers(shell: Any) -> None:
    """Drop the debuggers of this cell: each holds what it has shown."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _is_debugger(frame.f_trace):
            frame.f_trace = None
        frame = frame.f_back
    drop_debuggers(shell)


def _is_debugger(trace: Any) -> bool:
    return isinstance(getattr(trace, "__self__", None), bdb.Bdb)
