"""Sees hooks that a cell has autograd call with the gradient of a parameter."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from labkit.compat.torch import has_gradient_hooks
from labkit.strategies.model.gradients import is_of_cell

OF_A_PART = (
    "{name} has a hook for its gradient, which is called with the gradient of a part "
    "of the batch (the samples of this rank and microbatch), where one process calls "
    "it with that of the whole batch. This makes no difference to a hook that "
    "multiplies by a number or a mask; but for one that clamps, normalizes or looks at "
    "values change parameter.grad between backward and step instead, which is that of "
    "the whole batch"
)
TOO_LATE = (
    "the loop calls register_post_accumulate_grad_hook after prepare, and {strategy} "
    "takes a parameter's gradient away before such a hook is called. Change "
    "parameter.grad between backward and step instead"
)


def first_hooked(model: nn.Module) -> str | None:
    """The name of the first parameter with a hook for its gradient, if any has one."""
    named = model.named_parameters()
    return next((name for name, p in named if has_gradient_hooks(p)), None)


@contextlib.contextmanager
def watching_gradient_hooks(
    see: Callable[[nn.Parameter, bool], None],
) -> Iterator[None]:
    """Call `see(parameter, is_after)` before a cell registers a hook for a parameter's
    gradient: one that is called once it is in `parameter.grad`, or before."""
    names = ("register_hook", "register_post_accumulate_grad_hook")
    kinds: list[Any] = [nn.Parameter, DTensor]  # as parameters that are split are

    def watched(name: str) -> Callable[..., Any]:
        plain: Callable[..., Any] = getattr(torch.Tensor, name)

        @functools.wraps(plain)
        def register(self: nn.Parameter, hook: Callable[..., Any]) -> Any:
            if is_of_cell(sys._getframe(1)):
                see(self, name != "register_hook")
            return plain(self, hook)

        return register

    for kind, name in itertools.product(kinds, names):
        setattr(kind, name, watched(name))
    try:
        yield
    finally:
        for kind, name in itertools.product(kinds, names):
            delattr(kind, name)
