"""A rank's output streams: restored after every cell, forwarded between cells too."""

import builtins
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from labkit import timeouts
from labkit.compat.ipython import Taking
from labkit.compat.ipython import captured
from labkit.compat.ipython import display_pages
from labkit.compat.ipython import leave_to_threads
from labkit.compat.ipython import wrap_taking
from labkit.rank.terminal.native_output import NativeOutput
from labkit.rank.terminal.native_output import from_server
from labkit.rank.terminal.native_output import send_lines_at_once
from labkit.records import KEY
from labkit.unsent import Tail

MAX_TURNS = 50
"""In a second, from stdout to stderr or back: for these the order is kept."""
MAX_FLUSHES = 25
"""In a second, of one stream: each is a message, of which a notebook takes some
hundreds a second from all ranks. Its next ones would wait behind the rest."""

BURST = 2**22
RATE = 2**21
"""Characters that ranks write at once without waiting, each, and in a second, all of
them together: about what a notebook shows. What they write faster than that is kept
until it is shown, and an interrupt, and how the cell has ended, come behind it."""
WRITE_COST = 32
"""Characters that each call costs besides its own, and twice that each line: `print`
writes its end by a call of its own."""


class Console:
    """The streams of an engine whose IPython shell is `shell`.

    Output belongs to the request that was handled when it was printed. What threads
    print between two cells belongs to a request of labkit's own, "listen", which
    never ends.
    """

    def __init__(self, shell: Any, num_ranks: int = 1) -> None:
        self._shell = shell
        pace = Pace(RATE / num_ranks)
        self._streams: dict[str, Any] = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._send: list[Callable[[], None]] = []
        """Sends what a stream holds, each."""
        self._print = builtins.print
        self._listener: dict[str, Any] = {}
        self._directory: str | None = None
        self._set_parent = shell.set_parent
        shell.set_parent = self._handle
        for stream in self._streams.values():
            # A closed one could never be opened again.
            setattr(stream, "close", lambda: None)  # noqa: B010
            if from_server.unsent is not None:
                keep_unsent(stream, Tail(from_server.unsent, stream.name))
            self._send.append(flush_what_was_written(stream))
            pace.slow(stream)
        keep_order(*self._streams.values())
        self._native_output: list[NativeOutput] = []
        for stream in self._streams.values():
            if (found := captured(stream)) is not None:
                self._native_output.append(NativeOutput(stream.write, *found))
                # For `subprocess.run(..., stdout=sys.stdout)`: ipykernel names the log.
                stream.fileno = functools.partial(int, found[0])
        if self._native_output:
            send_lines_at_once()
        write_behind(self._wait_for_native_output, *self._streams.values())
        os.register_at_fork(after_in_child=self._write_to_descriptors)
        display_pages(shell)
        # Lightning takes a prompt for a sign of an interactive user.
        vars(sys).pop("ps1", None)

    def listen(self, parent: dict[str, Any]) -> None:
        """Send what is printed between two cells as output of the request `parent`."""
        self._listener = parent["header"]

    def _handle(self, parent: dict[str, Any]) -> None:
        """A request begins: what is printed now belongs to it."""
        self._set_parent(parent)
        if KEY not in parent.get("metadata", {}):
            self._leave_to_threads()

    def _leave_to_threads(self) -> None:
        """What threads other than the main one print belongs to the listener."""
        outputs = (*self._streams.values(), self._shell.display_pub)
        leave_to_threads(outputs, self._listener)

    def move_to(self, directory: str | None) -> None:
        """Go where the notebook is, if it has moved; ranks may go elsewhere since."""
        if directory in (None, self._directory):
            return
        self._directory = directory
        try:
            os.chdir(directory)
        except OSError as error:
            self._print(
                f"labkit: the rank keeps its working directory: {error}",
                file=sys.stderr,
            )

    def restore(self) -> None:
        """At the end of a cell: put back what it has put in the streams' place.

        Scripts silence ranks by a `sys.stdout` or a `print` of their own, for as long
        as they run, and a process that runs one script need not undo it.
        """
        for name, own in self._streams.items():
            with contextlib.suppress(Exception):  # whatever the cell has put there
                getattr(sys, name).flush()
            setattr(sys, name, own)
        builtins.print = self._print

    def _write_to_descriptors(self) -> None:
        """In a fork, as a DataLoader's worker is: nothing sends what its streams keep.

        The rank reads its own file descriptors 1 and 2, which forks share, and has the
        threads that do.
        """
        self._native_output = []
        for number, stream in enumerate(self._streams.values(), start=1):
            file = open(  # noqa: SIM115
                number, "w", 1, "utf-8", "backslashreplace", closefd=False
            )
            stream.write, stream.flush = file.write, file.flush

    def _wait_for_native_output(self) -> None:
        for each in self._native_output:
            each.wait()

    def end_cell(self) -> None:
        """Send what the cell has printed; threads that continue print between cells."""
        self.flush()
        self._leave_to_threads()

    def flush(self) -> None:
        """Send what was printed, however often that has been done in this second."""
        self._wait_for_native_output()
        for send in self._send:
            send()


def keep_unsent(stream: Any, tail: Tail) -> None:
    """Have `tail` know what is written to `stream`, and what of it is sent."""
    write, process = stream.write, os.getpid()
    lock = threading.RLock()  # a signal's handler may print while it is held

    def write_and_keep(text: str) -> Any:
        if os.getpid() != process:  # a fork has kept this, as a bar's `file.write`
            return write(text)
        with lock:
            done = write(text)
            tail.add(text)
        return done

    def wrap(take: Taking) -> Taking:
        def take_and_note() -> Iterator[tuple[dict[str, Any], str]]:
            if os.getpid() != process:  # the pages are those of the rank
                yield from take()
                return
            with lock:
                held, num_written = [*take()], tail.num_written
            yield from held
            # As it goes on after the last, that is on its way.
            with lock:
                tail.note_sent(num_written)

        return take_and_note

    stream.write = write_and_keep
    wrap_taking(stream, wrap)


class Pace:
    """Slows down what writes more than `rate` characters a second for some time."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._waiting = 0.0
        """Characters that the notebook has not shown yet, about."""
        self._at = time.monotonic()

    def slow(self, stream: Any) -> None:
        """Have `stream.write` wait where the notebook is far behind."""
        write = stream.write

        def write_in_turn(text: str) -> Any:
            now = time.monotonic()
            shown = (now - self._at) * self._rate
            self._at = now
            cost = len(text) + WRITE_COST * max(1, 2 * text.count("\n"))
            self._waiting = max(0.0, self._waiting - shown) + cost
            done = write(text)
            late_s = (self._waiting - BURST) / self._rate
            # At the end of a line, which would be shown in two parts.
            if late_s > 0 and (text.endswith("\n") or late_s > timeouts.PRINT_S):
                self._waiting = min(
                    self._waiting, BURST + self._rate * timeouts.PRINT_S
                )
                time.sleep(min(late_s, timeouts.PRINT_S))
            return done

        stream.write = write_in_turn


def flush_what_was_written(stream: Any) -> Callable[[], None]:
    """Have `stream.flush` do nothing where nothing was written since the last time, or
    where it is called in every turn of a fast loop, as by `logging`: the stream sends
    by itself what is a fifth of a second old. Returns what flushes all the same.

    IPython and ipykernel flush eight times a cell, and each time wait for the thread
    that publishes: a third of an engine's time for a trivial cell.
    """
    write, flush = stream.write, stream.flush
    # Told apart by identity: what a thread has written is newer than any flush that
    # ended before it, whoever was interrupted where.
    written: list[Any] = []
    flushed: list[Any] | None = None
    num_flushes, second = 0, 0

    def write_and_note(text: str) -> Any:
        nonlocal written
        try:
            return write(text)
        finally:
            written = []  # after it: a flush meanwhile may have missed it

    def flush_if_written() -> None:
        nonlocal flushed
        seen = written
        if seen is not flushed:
            flush()
            flushed = seen  # after it: an interrupt may cut it short

    def flush_seldom() -> None:
        nonlocal num_flushes, second
        if written is flushed:
            return
        if (now := int(time.monotonic())) != second:
            num_flushes, second = 0, now
        num_flushes += 1
        if num_flushes <= MAX_FLUSHES:
            flush_if_written()

    stream.write, stream.flush = write_and_note, flush_seldom
    return flush_if_written


def keep_order(*streams: Any) -> None:
    """Have what is written to one stream sent before what is later written to another.

    By themselves each sends within a fifth of a second: ranks that write the same would
    be shown to differ. A flush takes a tenth of a millisecond, so that a loop that goes
    back and forth between streams is kept in order for its first turns of every second.
    """
    last = streams[0]
    num_turns, second = 0, 0

    def keep(stream: Any) -> None:
        write = stream.write

        def write_in_order(text: str) -> Any:
            nonlocal last, num_turns, second
            if last is not stream:
                earlier, last = last, stream
                if (now := int(time.monotonic())) != second:
                    num_turns, second = 0, now
                num_turns += 1
                if num_turns <= MAX_TURNS:
                    earlier.flush()
            return write(text)

        stream.write = write_in_order

    for stream in streams:
        keep(stream)


def write_behind(wait: Callable[[], None], *streams: Any) -> None:
    """Have the main thread `wait` before it writes or flushes, as before a display: for
    what others have written."""

    def wait_if_main() -> None:
        if threading.current_thread() is threading.main_thread():
            wait()

    def order(stream: Any) -> None:
        write, flush = stream.write, stream.flush

        def write_later(text: str) -> Any:
            wait_if_main()
            return write(text)

        def flush_later() -> None:
            wait_if_main()
            flush()

        stream.write, stream.flush = write_later, flush_later

    for stream in streams:
        order(stream)
