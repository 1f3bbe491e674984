"""Finds what an optimizer keeps of the model besides the parameters in its groups."""

from collections.abc import Iterable
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import HOOKS_OF_STEP
from labkit.compat.torch import num_hooks

NUM_SEARCHED = 1000
"""Of the items of a list or a dict."""
KEPT = (
    "{kind} keeps {what} in self.{name}, and under {strategy} it gets other "
    "tensors in their place: its step would look for gradients and settings of those "
    "that it keeps, and find none. Have it use the parameters in self.param_groups "
    "alone, with what it is to know of one as a setting of its group; or use ddp"
)
PARAMETERS, IDS, MODULES, HOOKED = (
    "parameters of the model",
    "the id() of parameters",
    "the model, or layers of it",
    "layers of the model that have hooks",
)
"""Kinds of what it may keep."""

_LEFT_OUT = ("step", "state", "param_groups", *HOOKS_OF_STEP)
"""Of an optimizer: what it has of the parameters in any case."""


def check_kept(
    optimizer: torch.optim.Optimizer, strategy: str, kinds: Iterable[str]
) -> None:
    """UnsupportedLoopError for an optimizer of the loop's own that keeps what is of one
    of these `kinds`: it would not be what `strategy` gives it in its groups."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    groups = optimizer.param_groups
    ids = {id(each) for group in groups for each in group["params"]}
    seen = set(map(id, (optimizer, optimizer.state, groups)))
    for name, value in vars(optimizer).items():
        if name in _LEFT_OUT:
            continue
        if what := next((k for k in found_in(value, ids, seen) if k in kinds), None):
            kind = type(optimizer).__name__
            raise UnsupportedLoopError(
                KEPT.format(kind=kind, what=what, name=name, strategy=strategy)
            )


def found_in(value: Any, ids: set[int], seen: set[int]) -> Iterator[str]:
    """The kinds of what there is in a value, of the parameters with these ids."""
    if isinstance(value, int):
        if value in ids:
            yield IDS
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if id(value) in ids:
            yield PARAMETERS
    elif isinstance(value, nn.Module):
        if any(id(each) in ids for each in value.parameters()):
            yield MODULES
            if any(map(num_hooks, value.modules())):
                yield HOOKED
    elif isinstance(value, dict):
        for key, each in islice(value.items(), NUM_SEARCHED):
            yield from found_in(key, ids, seen)
            yield from found_in(each, ids, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in islice(value, NUM_SEARCHED):
            yield from found_in(each, ids, seen)
    elif not isinstance(value, type) and not callable(value):
        for name, each in getattr(value, "__dict__", {}).items():
            if name not in _LEFT_OUT:
                yield from found_in(each, ids, seen)
