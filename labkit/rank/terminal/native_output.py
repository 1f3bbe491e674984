"""What native code and other processes write to a rank's file descriptors 1 and 2."""

import codecs
import contextlib
import os
import select
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


from_server = FromServer()


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
        self._is_writing = False
        self._thread = threading.Thread(
            target=self._watch, name=f"labkit-output-{descriptor}", daemon=True
        )
        self._poll = self._new_poll()
        self._thread.start()

    def wait(self) -> None:
        """Until what has come so far is written."""
        # The thread may have a piece in its hands, and all else comes in the next one.
        last = self._num_pieces + 2
        while (
            self._num_pieces < last
            # In this order: it says that it is about to write before it reads.
            and (self._poll.poll(0) or self._is_writing)
            and self._thread.is_alive()
        ):
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
            self._is_writing = False
