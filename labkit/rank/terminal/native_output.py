"""What native code and other processes write to a rank's file descriptors 1 and 2."""

import codecs
import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import Any

_PIECE = 2**16
"""Bytes that are read at once: all that a pipe holds, of Linux's usual size."""


class NativeOutput:
    """Writes to a stream what comes in at its file descriptor.

    ipykernel does the same in a thread, which may come late: what `os.system` prints is
    then shown behind what the cell prints next, or after its end. Here the main thread
    reads what is there before it goes on.
    """

    def __init__(self, write: Callable[[str], Any], descriptor: int, log: int) -> None:
        """What comes in at `descriptor` also goes to `log`, for when this process
        dies."""
        self._write = write
        self._log = log
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A signal's handler may print while the main thread has it.
        self._reading = threading.RLock()
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        os.dup2(end, descriptor)  # nothing comes to ipykernel any more
        os.close(end)
        self._has_come = select.poll()
        self._has_come.register(self._pipe, select.POLLIN)
        name = f"labkit-output-{descriptor}"
        threading.Thread(target=self._watch, name=name, daemon=True).start()

    def take(self) -> None:
        """Write what has come so far."""
        with self._reading:  # the thread may have some of it in its hands
            if self._has_come.poll(0):
                self._take_piece()

    def _watch(self) -> None:
        """In a thread: write what comes, whatever the main thread does."""
        poll, is_open = select.poll(), True
        poll.register(self._pipe, select.POLLIN)
        while is_open:
            poll.poll()
            with self._reading:
                is_open = self._take_piece()

    def _take_piece(self) -> bool:
        """Whether somebody may still write to the pipe."""
        try:
            piece = os.read(self._pipe, _PIECE)
        except BlockingIOError:  # another thread has taken it
            return True
        with contextlib.suppress(OSError):  # the disk is full, say
            os.write(self._log, piece)
        self._write(self._decoder.decode(piece))
        return piece != b""
