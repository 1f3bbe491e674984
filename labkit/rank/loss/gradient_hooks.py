"""Sees hooks that a cell has autograd call with the gradient of a parameter."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from labkit.compat.torch import has_gradient_hooks
from labkit.strategies.model.gradients import is_of_cell

OF_A_PART = (
    "{name} has a hook for its gradient, which is called with a part of it (that of "
    "the samples of this rank and microbatch, and of this rank's stage), where one "
    "process calls it with that of the whole batch. This makes no difference to a hook "
    "that multiplies by a number or a mask; but for one that clamps, normalizes or "
    "looks at values change parameter.grad between backward and step instead, which is "
    "that of the whole batch"
)
TOO_LATE = (
    "the loop calls register_post_accumulate_grad_hook after prepare, and such a hook "
    "would be called after that of {strategy}, which takes the gradient of a parameter "
    "to average it over the ranks: what it changes could be lost. Change "
    "parameter.grad between backward and step instead, which is that of the whole batch"
)


def hooked_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those with a hook for their gradient, by name."""
    return [(n, p) for n, p in model.named_parameters() if has_gradient_hooks(p)]


@contextlib.contextmanager
def watching_gradient_hooks(
    see: Callable[[nn.Parameter, bool], None],
) -> Iterator[None]:
    """Call `see(parameter, is_after)` before a cell registers a hook for a parameter's
    gradient: one that is called once it is in `parameter.grad`, or before."""
    names = ("register_hook", "register_post_accumulate_grad_hook")
    kinds: list[Any] = [nn.Parameter, DTensor]  # as parameters that are split are

    def watched(kind: Any, name: str) -> Callable[..., Any]:
        plain: Callable[..., Any] = getattr(kind, name)

        @functools.wraps(plain)
        def register(self: nn.Parameter, hook: Callable[..., Any]) -> Any:
            if is_of_cell(sys._getframe(1)):
                see(self, name != "register_hook")
            return plain(self, hook)

        return register

    places = [*itertools.product(kinds, names)]
    before = [vars(kind).get(name) for kind, name in places]
    ours = [watched(kind, name) for kind, name in places]
    for (kind, name), each in zip(places, ours, strict=True):
        setattr(kind, name, each)
    try:
        yield
    finally:
        for (kind, name), own, each in zip(places, before, ours, strict=True):
            if vars(kind).get(name) is not each:
                continue  # the cell has put another in its place, or deleted it
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)
