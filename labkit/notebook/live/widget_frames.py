"""Encodes a run's records as keyframes and deltas, for a front end to draw."""

from typing import Any

import numpy as np

from labkit.notebook.history.collector import Collector
from labkit.notebook.history.curves import MEMORY
from labkit.notebook.history.curves import UNSEEN
from labkit.notebook.history.thinning import thin
from labkit.notebook.live.unsent import Unsent
from labkit.records import MIB

Series = tuple[int, str, np.ndarray, np.ndarray]
"""Rank, name, steps and values."""

Frame = tuple[dict[str, Any], bytes]
"""A header, which JSON can hold, and the values that it describes.

The header has a `sequence` and the `series`: rank, name and number of points of each.
The bytes are little-endian float64: of each series all steps, then all values. The
series `MEMORY` is what tensors held, in MiB: see `records.RECORD`.
"""


class FrameEncoder:
    """The records of a run as frames, each with a sequence number.

    A keyframe is the state of its number. A delta is what to append to the state of
    the number before. Whoever missed one waits for a keyframe.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._sequence = 0
        self._unsent = Unsent(collector)

    def delta(self) -> Frame | None:
        """What is new since the last delta; None where that is more than records, and a
        keyframe is due."""
        self._sequence += 1
        new, continues = self._unsent.take()
        if not continues:
            return None
        return self._pack([each for rank in new for each in _split(rank, *new[rank])])

    def keyframe(self) -> Frame:
        """What all deltas until now add up to, long series thinned."""
        series = [
            (rank, name, *thin(steps, values))
            for rank, num_records in self._unsent.num_sent.items()
            for rank, name, steps, values in _split(
                rank,
                self._unsent.names[rank],
                self._collector.records(rank)[:num_records],
            )
        ]
        return self._pack(series)

    def _pack(self, series: list[Series]) -> Frame:
        header = {
            "sequence": self._sequence,
            "series": [[rank, name, len(steps)] for rank, name, steps, _ in series],
        }
        arrays = [array for _, _, *pair in series for array in pair]
        return header, b"".join(array.astype("<f8").tobytes() for array in arrays)


def _split(rank: int, names: list[str], records: np.ndarray) -> list[Series]:
    """Records of one rank by metric, and the memory at all of them."""
    if not len(records):
        return []
    known = records[records["memory_bytes"] > 0]
    found: list[Series] = [(rank, MEMORY, known["step"], known["memory_bytes"] / MIB)]
    for metric in np.unique(records["metric"]):
        if names[metric] not in UNSEEN and not names[metric].startswith("("):
            chosen = records[records["metric"] == metric]
            found.append((rank, names[metric], chosen["step"], chosen["value"]))
    return found
