"""Calls of a split layer by itself: what it gives a loop is whole, and no part."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel

from labkit.compat.c10d import as_plain_output
from labkit.compat.torch import is_within_backward
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.tensor.plan import Styles


class Calls:
    """How many forward passes are under way of modules that have split layers."""

    depth = 0

    def is_alone(self) -> bool:
        """Whether a layer that is called is so by the loop, or by a method of a model.

        A block of which a backward pass computes the activations again has the same
        layers as the first time, though its module is not called.
        """
        return not self.depth and not is_within_backward()


def give_whole_outputs(
    model: nn.Module, plan: Mapping[str, Styles], mesh: DeviceMesh
) -> None:
    """Have layers that are split by columns gather their output where they are called
    by themselves, and those split by rows take their part of one that is whole.

    Within the forward pass of a module around it a layer hands on its part, to a layer
    that is split by rows: there nothing is gathered.
    """
    calls = Calls()
    names = dict(model.named_modules())
    around = {name for each in plan for name in above(each)}
    for name in sorted(around):
        count_calls(names[name], calls)
    for name, styles in plan.items():
        for style in styles:
            if gives_a_part(style):
                names[name].register_forward_hook(gathering(calls, mesh))
            elif takes_a_part(names[name], style):
                hook = taking_a_part(calls, mesh)
                names[name].register_forward_pre_hook(hook, prepend=True)


def above(name: str) -> list[str]:
    """The names of the modules around one: of the model, "" is that."""
    words = name.split(".")
    return [".".join(words[:number]) for number in range(len(words))]


def gives_a_part(style: Any) -> bool:
    return (
        isinstance(style, ColwiseParallel)
        and style.use_local_output
        and tuple(style.output_layouts) == (Shard(-1),)
    )


def takes_a_part(layer: nn.Module, style: Any) -> bool:
    return (
        isinstance(layer, nn.Linear)
        and isinstance(style, RowwiseParallel)
        and tuple(style.input_layouts) == (Shard(-1),)
    )


def count_calls(module: nn.Module, calls: Calls) -> None:
    """Not by hooks: an interrupt leaves a forward pass without them, and one that has
    failed before it began has those alone that come after it."""

    def counted(plain: Forward) -> Forward:
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            calls.depth += 1
            try:
                return plain(module, *args, **kwargs)
            finally:
                calls.depth -= 1

        return forward

    wrap_forward(module, counted)


def gathering(calls: Calls, mesh: DeviceMesh) -> Any:
    def gather(layer: nn.Module, args: Any, output: Any) -> Any:
        is_part = isinstance(output, torch.Tensor) and not isinstance(output, DTensor)
        if not is_part or not calls.is_alone():
            return None
        part = DTensor.from_local(output, mesh, [Shard(output.dim() - 1)])
        return as_plain_output(part.redistribute(placements=[Replicate()]).to_local())

    return gather


def taking_a_part(calls: Calls, mesh: DeviceMesh) -> Any:
    def take(layer: Any, args: Any) -> Any:
        if not args or not calls.is_alone():
            return None
        (given, *rest) = args
        is_plain = isinstance(given, torch.Tensor) and not isinstance(given, DTensor)
        if not is_plain or given.shape[-1] != layer.weight.shape[-1]:
            return None
        whole = DTensor.from_local(given, mesh, [Replicate()])
        part = whole.redistribute(placements=[Shard(given.dim() - 1)])
        return (part.to_local(), *rest)

    return take
