"""Wraps a model's forward pass, as a method of that model.

Not as hooks: an interrupt leaves a method too, a copy of the model has its own, and
`torch.compile` goes through it.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def wrap_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Forward:
    """Make `wrap(forward)` the model's, where both are functions of the model; returns
    what takes that back."""
    given = vars(module).get("forward")
    plain = as_function(module)
    wrapped = functools.wraps(plain)(wrap(plain))
    ours = vars(module)["forward"] = types.MethodType(wrapped, module)

    def undo() -> None:
        if vars(module).get("forward") is not ours:
            return  # the loop has put another in its place
        del vars(module)["forward"]
        if given is not None:
            vars(module)["forward"] = given

    return undo


def as_function(module: nn.Module) -> Forward:
    """What a model's `forward` is, as a function of the model."""
    forward = module.forward
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        return forward.__func__
    # Another module's, a static one, or a function that was assigned.
    return lambda module, *args, **kwargs: forward(*args, **kwargs)
