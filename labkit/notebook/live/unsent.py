"""Keeps the book of which records of a run were sent to who draws them elsewhere."""

import numpy as np

from labkit.notebook.history.collector import Collector

New = dict[int, tuple[list[str], np.ndarray]]
"""By rank: the names of its metrics by id, and records, (num_new,) of `RECORD`."""


class Unsent:
    """The records of a run that have not been sent yet."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._num_restarts = collector.num_restarts
        self.num_sent = dict.fromkeys(collector.ranks, 0)
        self.names: dict[int, list[str]] = {rank: [] for rank in collector.ranks}
        """As they were sent last."""

    def take(self) -> tuple[New, bool]:
        """What is new since the last call, and whether it continues what was sent.

        It does not where a restarted run goes back some steps, or a metric has another
        name: then the receiver starts over.
        """
        continues = self._num_restarts == self._collector.num_restarts
        self._num_restarts = self._collector.num_restarts
        new: New = {}
        for rank in self._collector.ranks:
            # Before the names, to which another thread may add: each is known then.
            records = self._collector.records(rank)
            names = self._collector.metrics(rank)
            continues &= names[: len(self.names[rank])] == self.names[rank]
            new[rank] = names, records[self.num_sent[rank] :]
            self.names[rank], self.num_sent[rank] = names, len(records)
        return new, continues
