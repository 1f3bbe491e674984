"""Has a batch that a DataLoader's worker cannot send fail in the worker's own code.

A worker hands batches to a thread, which moves tensors into shared memory and pickles
the rest. What that thread raises, as for a full /dev/shm, it prints, and the loop waits
for the batch for ever. What collating a batch raises, the loop raises.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info


@dataclass(frozen=True)
class Sendable:
    """What `collate` makes, with its tensors in shared memory where a worker sends it;
    raises what sending it would raise."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        if get_worker_info() is not None:
            _Rehearsal(_Nowhere()).dump(batch)
        return batch


class _Rehearsal(ForkingPickler):
    """Pickles a batch as the queue does, but for what is large."""

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not value.is_leaf:
                raise ValueError(
                    "a batch of a DataLoader's worker has a tensor with a graph, which "
                    "cannot be sent; detach() it in the dataset or in collate_fn"
                )
            if value.layout == torch.strided and value.device.type == "cpu":
                value.share_memory_()
            return "tensor"
        is_plain = type(value) is np.ndarray and not value.dtype.hasobject
        return "array" if is_plain else None


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return len(content)
