"""Delays Ctrl-C and the stop button where they would leave an inconsistent state."""

import contextlib
import signal
import threading
from collections.abc import Callable
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_is_held = False
_noted = False
_is_to_end: ContextVar[Callable[[], bool] | None] = ContextVar("ends", default=None)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Note an interrupt in this block; `check`, or the end of the block, raises it.

    Python raises KeyboardInterrupt at any line, also between the start of a process
    and the note that it was started. In other threads, which no signal reaches, and
    in a block within another it does nothing.
    """
    global _is_held, _noted
    if _is_held or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(signum: int, frame: Any) -> None:
        global _noted
        _noted = True

    _noted, _is_held = False, True
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
        check()
    finally:
        _is_held = False
        signal.signal(signal.SIGINT, previous)


def check() -> None:
    """KeyboardInterrupt if one was held back, or the thread is to end; for places
    where all is in order."""
    global _noted
    if (ends := _is_to_end.get()) is not None and ends():
        raise KeyboardInterrupt
    if _is_held and _noted and threading.current_thread() is threading.main_thread():
        _noted = False
        raise KeyboardInterrupt


def end_thread_when(is_to_end: Callable[[], bool]) -> None:
    """Have `check` end this thread, which no signal reaches, as an interrupt would."""
    _is_to_end.set(is_to_end)
