"""What is to be done around a model's forward pass, as a method of that model.

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
    plain = type(module).forward if given is None else as_function(given)
    wrapped = functools.wraps(plain)(wrap(plain))
    ours = vars(module)["forward"] = types.MethodType(wrapped, module)

    def undo() -> None:
        if vars(module).get("forward") is not ours:
            return  # the loop has put another in its place
        del vars(module)["forward"]
        if given is not None:
            vars(module)["forward"] = given

    return undo


def as_function(given: Forward) -> Forward:
    """The `forward` that somebody has put into a model, as a function of the model."""
    if isinstance(given, types.MethodType):
        return given.__func__
    return lambda module, *args, **kwargs: given(*args, **kwargs)
