"""What a process has printed and not sent, in a file that outlives the process.

A stream of ipykernel's sends what it holds five times a second. What a rank prints
right before it is killed, or crashes in native code, would be lost.
"""

import mmap
import os
import struct
from pathlib import Path

STREAMS = ("stdout", "stderr")
SIZE = 2**14
"""Bytes that are kept of a stream."""

_COUNTS = struct.Struct("<QQ")
"""How many bytes were written to it, and how many of them were sent."""
_PART = _COUNTS.size + SIZE


def shared_pages(path: Path) -> mmap.mmap:
    """A new file's, for every stream. OSError where the disk is full, say."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    zeros = bytes(_PART * len(STREAMS))
    descriptor = os.open(path, flags, 0o600)
    try:
        # Not sparse: a write to a page for which there is no block ends the process.
        if os.write(descriptor, zeros) < len(zeros):
            raise OSError("the disk is full")
        return mmap.mmap(descriptor, len(zeros))
    finally:
        os.close(descriptor)


class Tail:
    """The last bytes that were written to a stream. For one thread at a time."""

    def __init__(self, pages: mmap.mmap, stream: str) -> None:
        """`pages` are those that `shared_pages` gave."""
        self._pages = pages
        self._counts_at = STREAMS.index(stream) * _PART
        self._begin = self._counts_at + _COUNTS.size
        self.num_written = 0
        """Bytes, since the file was new."""
        self._num_sent = 0

    def add(self, text: str) -> None:
        """Note that this was written."""
        data = text.encode("utf-8", "surrogatepass")
        self.num_written += len(data)
        data = data[-SIZE:]
        place = (self.num_written - len(data)) % SIZE
        at = self._begin + place
        if (num_over := place + len(data) - SIZE) > 0:  # goes on where the ring begins
            self._pages[self._begin : self._begin + num_over] = data[-num_over:]
            data = data[:-num_over]
        self._pages[at : at + len(data)] = data
        self._write_counts()

    def note_sent(self, num_sent: int) -> None:
        """Note that so many of `num_written` bytes were sent."""
        self._num_sent = num_sent
        self._write_counts()

    def _write_counts(self) -> None:
        counts = self.num_written, self._num_sent
        _COUNTS.pack_into(self._pages, self._counts_at, *counts)


def unsent_output(path: Path) -> dict[str, str]:
    """The text that was written and not sent, of the streams that have some: its last
    `SIZE` bytes, behind a line that says so where there was more."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    found = {}
    for number, stream in enumerate(STREAMS):
        part = data[number * _PART : (number + 1) * _PART]
        if len(part) < _PART:  # the disk was full
            continue
        num_written, num_sent = _COUNTS.unpack_from(part)
        ring = part[_COUNTS.size :]
        num_unsent = max(num_written - num_sent, 0)  # a SIGKILL may tear the counts
        num_kept = min(num_unsent, SIZE)
        begin = (num_written - num_kept) % SIZE
        kept = (ring[begin:] + ring[:begin])[:num_kept]
        if kept:
            lost = num_unsent - num_kept
            cut = f"(labkit: {lost:,} bytes before this are lost)\n" if lost else ""
            found[stream] = cut + kept.decode("utf-8", "replace")
    return found
