"""Refuses collectives of a model's own over ranks that it does not speak of."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import OPERATORS
from labkit.compat.c10d import Group
from labkit.compat.c10d import group_named
from labkit.compat.c10d import ranks_of
from labkit.compat.torch import TorchDispatchMode

_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed.nn.functional")


def is_collective(func: Any) -> bool:
    """Whether it is one of the functions of torch.distributed that send tensors."""
    return getattr(func, "__module__", None) in _MODULES


class NoCollectives(TorchDispatchMode):
    """Within it a collective with one of the ranks `others` is refused before it is
    begun, in the words of `why`."""

    def __init__(self, others: Iterable[int], why: str) -> None:
        super().__init__()
        self._others, self._why = set(others), why

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in OPERATORS and self._others & ranks_among(args):
            raise UnsupportedLoopError(self._why)
        return func(*args, **kwargs or {})


class NoCollectiveCalls(TorchFunctionMode):
    """The same for functions of torch.distributed that are called: other operators, as
    those of DTensors, may exchange what they need."""

    def __init__(self, others: Iterable[int], why: str) -> None:
        super().__init__()
        self._others, self._why = set(others), why

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_collective(func):
            groups = [g for g in (*args, *kwargs.values()) if isinstance(g, Group)]
            if self._others & set(ranks_of(groups[0] if groups else default_group())):
                raise UnsupportedLoopError(self._why)
        return func(*args, **kwargs)


def default_group() -> Group:
    found = dist.group.WORLD
    assert found is not None
    return found


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
