"""The batches that a loss is of, found in what its autograd graph has saved."""

from collections import deque
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.compat.torch import saved_tensors

MAX_NODES = 4096
"""Of a graph that are looked at: where it has more, it is not known."""


def is_of_one(
    root: Any, batch: frozenset[StorageWeakRef], others: frozenset[StorageWeakRef]
) -> bool:
    """Whether a graph has tensors of `batch`, and none of `others`."""
    waiting, seen = deque([root]), set()
    has_batch = False
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > MAX_NODES:
            return False
        stored = _stored_by(node)
        if stored & others:
            return False
        has_batch |= bool(stored & batch)
        waiting += [each for each, _ in node.next_functions]
    return has_batch


def _stored_by(node: Any) -> set[StorageWeakRef]:
    try:
        return {
            StorageWeakRef(each.untyped_storage())
            for each in saved_tensors(node)
            if each.layout is torch.strided
        }
    except RuntimeError:  # as of a graph that was freed, or a tensor without memory
        return set()
