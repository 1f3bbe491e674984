"""Delays Ctrl-C and the stop button where they would leave an inconsistent state."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_is_held = False
_noted = False


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
    """KeyboardInterrupt if one was held back; for places where all is in order."""
    global _noted
    if _is_held and _noted and threading.current_thread() is threading.main_thread():
        _noted = False
        raise KeyboardInterrupt
