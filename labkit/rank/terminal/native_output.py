"""What native code and other processes write to a rank's file descriptors 1 and 2."""

import codecs
import contextlib
import ctypes
import io
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from labkit import timeouts

_PIECE = 2**16
"""Bytes that are read at once: all that a pipe holds, of Linux's usual size."""


@dataclass
class FromServer:
    """What the process that has forked this one gives it."""

    pipes: list[tuple[int, int]] = field(default_factory=list)
    """To use: what is left in them when this process ends, that one reads."""
    log: int | None = None
    """A file for native output alone."""
    unsent: mmap.mmap | None = None
    """Of the file for what was printed and not sent: see `labkit.unsent`."""


from_server = FromServer()
_LINE_BUFFERED = 1
"""Linux's `_IOLBF`."""


def send_lines_at_once() -> None:
    """Have C's stdout, C++'s on top of it, and Python's own `sys.__stdout__` write each
    line when it ends, as at a terminal. Into a pipe they write some thousand characters
    at a time: a cell's lines would be shown with a later one, or die with the rank."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # has none, or other
        libc = ctypes.CDLL(None)
        stdout, size = ctypes.c_void_p.in_dll(libc, "stdout"), ctypes.c_size_t(0)
        libc.setvbuf(stdout, None, _LINE_BUFFERED, size)
    if isinstance(sys.__stdout__, io.TextIOWrapper):
        sys.__stdout__.reconfigure(line_buffering=True)


class NativeOutput:
    """Writes to a stream what comes in at its file descriptor.

    ipykernel does the same in a thread, which may come late: what `os.system` prints is
    then shown behind what the cell prints next, or after its end. Here the main thread
    can wait for it. It reads nothing itself: an interrupt would lose what it has read.
    """

    def __init__(self, write: Callable[[str], Any], descriptor: int, log: int) -> None:
        """What comes in at `descriptor` also goes to `log`, or a file of its own, for
        when this process dies."""
        self._write = write
        self._log = log if from_server.log is None else from_server.log
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pipe, end = from_server.pipes.pop() if from_server.pipes else os.pipe()
        os.dup2(end, descriptor)  # nothing comes to ipykernel any more
        os.close(end)
        self._num_pieces = 0
        self._num_emptied = 0
        """How often nothing more was in the pipe."""
        self._flood: int | None = None
        """That number, when what came was waited for and more came all the time."""
        self._is_writing = False
        self._thread = threading.Thread(
            target=self._watch, name=f"labkit-output-{descriptor}", daemon=True
        )
        self._poll = self._new_poll()
        self._thread.start()

    def wait(self) -> None:
        """Until what has come so far is written. Once only, where more comes all the
        time, as of a program in the background: each piece of what is more than a
        notebook shows may take a second, and the cell or its end would not go on."""
        # The thread may have a piece in its hands, and all else comes in the next one.
        last, emptied = self._num_pieces + 2, self._num_emptied
        while (
            self._flood != emptied
            # In this order: it says that it is about to write before it reads.
            and (self._poll.poll(0) or self._is_writing)
            and self._thread.is_alive()
        ):
            if self._num_pieces >= last:
                self._flood = emptied
            else:
                time.sleep(timeouts.PIECE_S)

    def _new_poll(self) -> Any:
        """Of one thread: two that poll by the same object are an error."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        return poll

    def _watch(self) -> None:
        """In a thread: write what comes until nobody is left to write to the pipe."""
        poll, piece = self._new_poll(), b" "
        while piece:
            poll.poll()
            self._is_writing = True
            piece = os.read(self._pipe, _PIECE)
            with contextlib.suppress(OSError):  # the disk is full, say
                os.write(self._log, piece)
            self._write(self._decoder.decode(piece))
            self._num_pieces += 1
            if not poll.poll(0):
                self._num_emptied += 1
            self._is_writing = False
