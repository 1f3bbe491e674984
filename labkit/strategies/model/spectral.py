"""Spectral normalization where parameters are in another precision than buffers.

Its power iteration multiplies the one by the other, which torch does in one precision
only. So it gets the weight in that of its buffers, as in a model that is in fp32.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labkit.compat.torch import SpectralNorm
from labkit.compat.torch import dtype_of_power_iteration
from labkit.compat.torch import forward_pre_hooks
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.model.gradients import gather

_Hook: Any = sys.modules["torch.nn.utils.spectral_norm"].SpectralNorm
"""A function hides the module of that name."""


def in_one_precision(model: nn.Module) -> list[Callable[[], None]]:
    """Have every spectral normalization of a model take weights of any precision;
    returns what takes that back."""
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if isinstance(module, SpectralNorm):
            undo.append(wrap_forward(module, _of_parametrization))
        for hook in forward_pre_hooks(module):
            if isinstance(hook, _Hook):
                vars(hook)["compute_weight"] = functools.partial(_compute_weight, hook)
                undo.append(functools.partial(_forget, hook))
    return undo


def _of_parametrization(plain: Forward) -> Forward:
    def forward(module: Any, weight: torch.Tensor) -> torch.Tensor:
        dtype = dtype_of_power_iteration(module, weight)
        found: torch.Tensor = plain(module, weight.to(dtype))
        return found.to(weight.dtype)

    return forward


def _compute_weight(
    hook: Any, module: nn.Module, do_power_iteration: bool
) -> torch.Tensor:
    name = f"{hook.name}_orig"
    weight = getattr(module, name)
    gather(weight)
    # An attribute of this name comes before the parameter.
    vars(module)[name] = weight.to(getattr(module, f"{hook.name}_u").dtype)
    try:
        found: torch.Tensor = _Hook.compute_weight(hook, module, do_power_iteration)
        return found.to(weight.dtype)
    finally:
        del vars(module)[name]


def _forget(hook: Any) -> None:
    vars(hook).pop("compute_weight", None)
