"""What a pass over a DataLoader of the loop's own has drawn, for ranks to compare."""

import contextlib
import zlib
from typing import Any

import numpy as np
import torch

from labkit.compat.torch import no_dispatch
from labkit.records import Draw
from labkit.strategies.model.fingerprints import fingerprints
from labkit.strategies.model.fingerprints import scrambled

MOST_KEPT = 2**14
"""Indices that are kept before they are added up: a pass may never end."""
NUM_ENDS = 8
"""Items at each end of a list or a tensor that are looked at."""
DEPTH = 4
"""Of a dataset within datasets, such as a Subset of one."""


class OwnPass:
    """Adds up the indices of one pass."""

    def __init__(self, num_backwards: int) -> None:
        self.num_backwards = num_backwards
        """Before it."""
        self._num_drawn = self._sum = 0
        self._kept: list[int] = []
        self._is_known = True

    def add(self, found: Any) -> None:
        """Of a batch, or of a sample; keys of another kind tell nothing."""
        if not self._is_known:
            return
        try:
            self._kept.extend(map(int, found if np.iterable(found) else [found]))
            if len(self._kept) >= MOST_KEPT:
                self._add_up()
        except (TypeError, ValueError, OverflowError):
            self._is_known = False
            self._kept.clear()

    def draw(self, dataset: Any, epoch: int) -> Draw | None:
        """What is to be compared; None where that is not known.

        Ranks that each have a part of the data by hand draw the same indices of it.
        """
        try:
            self._add_up()
            num_samples = len(dataset)
        except (TypeError, NotImplementedError, OverflowError):
            return None  # a sampler may go without
        if not self._is_known or not self._num_drawn:
            return None
        drawn = self._sum
        if self._num_drawn == num_samples:
            drawn += zlib.crc32(repr(held_by(dataset)).encode())
        return Draw(epoch, num_samples, self._num_drawn, drawn % 2**64, whole=0)

    def _add_up(self) -> None:
        self._num_drawn += len(self._kept)
        self._sum += mixed(np.asarray(self._kept, np.int64))
        self._kept.clear()


def held_by(value: Any, depth: int = DEPTH) -> Any:
    """What tells one dataset from another: sizes, and values at both ends."""
    kind = type(value)
    if value is None or kind in (bool, int, float, range):
        return value
    if kind in (str, bytes):
        return len(value), value[:NUM_ENDS], value[-NUM_ENDS:]
    if isinstance(value, torch.Tensor):
        # RuntimeError: it has no values that can be read, as a sparse one.
        with contextlib.suppress(RuntimeError, NotImplementedError), no_dispatch():
            ends = value.detach().flatten() if value.dim() < 1 else value.detach()
            numbers = fingerprints([ends[:NUM_ENDS], ends[-NUM_ENDS:]])
            return [*value.shape], numbers.tolist()
    elif kind is np.ndarray and value.dtype != object and value.ndim:
        return value.shape, value[:NUM_ENDS].tobytes(), value[-NUM_ENDS:].tobytes()
    elif depth and kind in (list, tuple):
        items = [*value[:NUM_ENDS], *value[-NUM_ENDS:]]
        return len(value), [held_by(each, depth - 1) for each in items]
    elif depth:
        inside = value if kind is dict else getattr(value, "__dict__", {})
        first = list(inside.items())[:NUM_ENDS]
        found = [(str(name), held_by(each, depth - 1)) for name, each in first]
        return kind.__name__, len(inside), found
    return kind.__name__


def mixed(indices: np.ndarray) -> int:
    """The sum of scrambled indices: equal for equal sets of them, in any order."""
    return int(scrambled(torch.from_numpy(indices)).sum()) % 2**64
