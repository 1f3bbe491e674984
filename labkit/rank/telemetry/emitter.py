"""Collects a rank's records and sends them in batches from a thread of its own."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Mapping

import torch

from labkit.rank.telemetry.journal import Journal
from labkit.records import UNREAD
from labkit.records import Batch

Value = float | torch.Tensor


class Unread:
    """A scalar on a GPU, on its way."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value
        # The loop may run in a stream of its own, which the reader's does not wait for.
        self._is_there = torch.cuda.Event(blocking=True)
        self._is_there.record(torch.cuda.current_stream(value.device))

    def read(self) -> float:
        """Its value, once it is there; in any thread."""
        try:
            self._is_there.synchronize()
            # In another stream, or the copy would wait for all that follows as well.
            with torch.cuda.stream(torch.cuda.Stream(self._value.device)):
                return float(self._value)
        except RuntimeError:  # a CUDA error, which the cell has raised or will
            return float("nan")


INTERVAL_S = 0.5
"""As often as the picture is drawn. On full cores each batch takes from the training
loop: sent ten times a second they took 5 % of steps of 2.5 ms."""


class Emitter:
    """Sends what `put` collects, every `interval_s` and once more on `close`.

    A training step pays for a write to the journal, which is memory; a GPU scalar is
    read in the emitter's thread, so that the training loop never waits for the device.
    """

    def __init__(
        self,
        send: Callable[[Batch], None],
        *,
        journal: Journal | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.journal = journal or Journal()
        self._send = send
        self._interval_s = interval_s
        self._metrics: dict[str, int] = {}
        self._unread: deque[tuple[int, Unread]] = deque()
        """(index of its record, scalar on a GPU), in order."""
        self._num_sent = 0
        self._started = time.perf_counter()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="labkit-emitter", daemon=True
        )
        self._thread.start()

    def put(self, name: str, value: Value, step: int, memory_bytes: int) -> None:
        """Queue one scalar: a number, or a tensor that nobody else will change."""
        self.put_all({name: value}, step, memory_bytes)

    def put_all(
        self, values: Mapping[str, Value], step: int, memory_bytes: int
    ) -> None:
        """Queue scalars of one moment, by name."""
        if os.getpid() != self._pid:
            return  # a forked worker of a DataLoader: the journal is its parent's
        seconds = time.perf_counter() - self._started
        with self._lock:
            if self._closing.is_set():
                return  # from a thread that outlived its cell
            for name, value in values.items():
                metric = self._metrics.get(name)
                if metric is None:
                    metric = self._metrics[name] = self.journal.add_name(name)
                scalar = UNREAD
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    self._unread.append((self.journal.num_records, Unread(value)))
                else:
                    scalar = float(value)
                self.journal.append(metric, step, seconds, memory_bytes, scalar)

    def close(self) -> None:
        """Send what is left and stop; every record is on its way when it returns."""
        with self._lock:
            self._closing.set()
        self._thread.join()
        self._flush()
        self.journal.close()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._flush()

    def _flush(self) -> None:
        end = self.journal.num_records
        while self._unread and self._unread[0][0] < end:
            index, unread = self._unread.popleft()
            self.journal.fill(index, unread.read())
        if end > self._num_sent:
            first, self._num_sent = self._num_sent, end
            names = list(self.journal.names)
            self._send(Batch(first, names, self.journal.take(end)))
