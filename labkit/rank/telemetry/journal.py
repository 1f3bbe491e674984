"""Keeps a rank's records in a file that outlives the rank."""

import json
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from labkit.checks import check_metric
from labkit.records import MAX_METRICS
from labkit.records import NAMES_FILE
from labkit.records import RECORD
from labkit.records import RECORDS_FILE
from labkit.records import UNWRITTEN

CHUNK_RECORDS = 2**15
"""Records that the file grows by: a whole number of pages, whatever a page is."""

_SIZE = RECORD.itemsize
_CHUNK_BYTES = CHUNK_RECORDS * _SIZE
_METRIC = struct.Struct("<H")
_FIELDS = struct.Struct("<qdqd")
_VALUE = struct.Struct("<d")
_VALUE_AT = _SIZE - _VALUE.size
assert _METRIC.size + _FIELDS.size == _SIZE
assert _CHUNK_BYTES % 2**16 == 0


class Journal:
    """One rank's records of one run, in the order in which they were logged.

    They are written into pages that the system shares with the file, so a record is
    safe as soon as `append` returns, however the process ends. Where `folder` cannot
    be written, or the disk is full, they are kept in memory alone: training does not
    fail because of it. Without a `folder` there is no file.

    One thread appends at a time; one other may `fill` and `take`.
    """

    def __init__(self, folder: str | Path | None = None, rank: int = 0) -> None:
        self.names = [UNWRITTEN]
        """Metrics by id, that is by place."""
        self.num_records = 0
        self.error = ""
        """Why records are in memory alone, if they are."""
        self._num_on_disk: int | None = 0 if folder is None else None
        self._records_file = self._names_file = -1
        self._chunks: dict[int, mmap.mmap] = {}
        self._num_taken = 0
        if folder is not None:
            try:
                self._names_file = _create(Path(folder, NAMES_FILE.format(rank)))
                self._records_file = _create(Path(folder, RECORDS_FILE.format(rank)))
            except OSError as error:
                self._continue_in_memory(error)
        self._chunk, self._chunk_begins = self._new_chunk(0), 0

    @property
    def num_not_on_disk(self) -> int:
        """Records that were never in the file; all of them where there is none."""
        if self._num_on_disk is None:
            return 0
        return self.num_records - self._num_on_disk

    def add_name(self, name: str) -> int:
        """The id of a new metric. ValueError for what is no name, or one too many."""
        if name in self.names:  # an interrupt came before the caller knew
            return self.names.index(name)
        check_metric(name)
        if len(self.names) > MAX_METRICS:
            raise ValueError(
                f"log({name[:40]}=...): a run has at most {MAX_METRICS:,} metrics, and "
                "this one has as many; log what varies as a value, not in the name"
            )
        if self._num_on_disk is None:
            try:
                self._write_name(name)
            except OSError as error:
                self._continue_in_memory(error)
        self.names.append(name)
        return len(self.names) - 1

    def append(
        self, metric: int, step: int, seconds: float, memory_bytes: int, value: float
    ) -> None:
        """Write one record; `metric` is an id that `add_name` gave."""
        place = self.num_records - self._chunk_begins
        if place == CHUNK_RECORDS:
            chunk = self._new_chunk(self.num_records // CHUNK_RECORDS)
            # Nothing is called in between: an interrupt finds both or neither.
            self._chunk, self._chunk_begins = chunk, self.num_records
            place = 0
        at = place * _SIZE
        # The metric last: where it is not 0, the record is whole.
        _FIELDS.pack_into(
            self._chunk, at + _METRIC.size, step, seconds, memory_bytes, value
        )
        _METRIC.pack_into(self._chunk, at, metric)
        self.num_records += 1

    def fill(self, index: int, value: float) -> None:
        """Write the value of a record that was appended with `UNREAD`."""
        number, place = divmod(index, CHUNK_RECORDS)
        _VALUE.pack_into(self._chunks[number], place * _SIZE + _VALUE_AT, value)

    def take(self, end: int) -> np.ndarray:
        """The records since the last call and before `end`: (num_records,) of RECORD.

        What is taken cannot be filled any more.
        """
        begin, self._num_taken = self._num_taken, end
        parts = []
        for number in range(begin // CHUNK_RECORDS, -(-end // CHUNK_RECORDS)):
            first = number * CHUNK_RECORDS
            low, high = max(begin - first, 0), min(end - first, CHUNK_RECORDS)
            # A slice of a map is a copy, so that nothing holds on to the map.
            parts.append(self._chunks[number][low * _SIZE : high * _SIZE])
        for number in list(self._chunks):
            if number < end // CHUNK_RECORDS:
                del self._chunks[number]
        return np.frombuffer(b"".join(parts), RECORD)

    def close(self) -> None:
        """Let go of the files; nothing is appended after it."""
        for descriptor in (self._records_file, self._names_file):
            if descriptor >= 0:
                # Some file systems report only here that the disk is full.
                with suppress(OSError):
                    os.close(descriptor)
        self._records_file = self._names_file = -1

    def _new_chunk(self, number: int) -> mmap.mmap:
        """Zeros for the next records: of the file, or else of memory."""
        chunk = None
        if self._num_on_disk is None:
            try:
                chunk = _extend(self._records_file, number * _CHUNK_BYTES)
            except OSError as error:
                self._continue_in_memory(error)
        if chunk is None:
            chunk = mmap.mmap(-1, _CHUNK_BYTES)
        self._chunks[number] = chunk
        return chunk

    def _write_name(self, name: str) -> None:
        # With its id, for an interrupt may come between this and the next line.
        line = json.dumps([len(self.names), name]).encode() + b"\n"
        if os.write(self._names_file, line) < len(line):
            raise OSError("the disk is full")

    def _continue_in_memory(self, error: OSError) -> None:
        self._num_on_disk = self.num_records
        self.error = error.strerror or str(error)


def _create(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def _extend(descriptor: int, begin: int) -> mmap.mmap:
    """The next chunk of a file, mapped. OSError where the disk is full.

    Its blocks are reserved before: a write to a mapped page for which there is none
    would end the process with SIGBUS.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, begin, _CHUNK_BYTES)
    else:
        zeros = bytes(_CHUNK_BYTES)
        if os.write(descriptor, zeros) < len(zeros):
            raise OSError("the disk is full")
    return mmap.mmap(descriptor, _CHUNK_BYTES, offset=begin)
