"""Refuses collectives over ranks of several stages in a layer, which one rank runs."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import OPERATORS
from labkit.compat.c10d import group_named
from labkit.compat.c10d import ranks_of
from labkit.compat.torch import TorchDispatchMode

COLLECTIVE = (
    "the model's forward calls a collective of torch.distributed, and under pipeline "
    "each layer runs on the one rank that has it, with the whole batch: the others "
    "have no samples to give, and would not come along. Leave the collective out of "
    "forward under pipeline, or use ddp"
)
_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed.nn.functional")


def is_collective(func: Any) -> bool:
    """Whether it is one of the functions of torch.distributed that send tensors."""
    return getattr(func, "__module__", None) in _MODULES


class NoCollectives(TorchDispatchMode):
    """Within it a collective with one of the ranks `others` is refused before it is
    begun: they would never come, or take it for another one."""

    def __init__(self, others: Iterable[int]) -> None:
        super().__init__()
        self._others = set(others)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in OPERATORS and self._others & ranks_among(args):
            raise UnsupportedLoopError(COLLECTIVE)
        return func(*args, **kwargs or {})


def ranks_among(args: Sequence[Any]) -> set[int]:
    """The ranks of the group that a collective's arguments name."""
    found: set[int] = set()
    for arg in args:
        try:
            if isinstance(arg, torch.ScriptObject):
                found.update(ranks_of(dist.ProcessGroup.unbox(arg)))
            elif isinstance(arg, str):
                found.update(ranks_of(group_named(arg)))
        except RuntimeError:  # a reduce operation, which is no group
            continue
    return found
