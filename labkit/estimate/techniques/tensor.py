"""Memory of split layers: a rank's part of the model, as a model of its own.

The part is traced as any model is; where ranks send each other activations it makes
tensors of the same sizes. Where the mesh has an axis of data parallelism, the part is
what is sharded along it.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Placement
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import PrepareModuleOutput
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from labkit.estimate.plans import Memory
from labkit.estimate.plans import Plan
from labkit.estimate.rows import Sizes
from labkit.estimate.techniques import fully_sharded
from labkit.estimate.techniques import replicated
from labkit.strategies import Strategy
from labkit.strategies.model.materialize import empty_copy
from labkit.strategies.tensor.plan import Styles
from labkit.strategies.tensor.plan import split_dim
from labkit.strategies.tensor.split import checked_plan


def memory(plan: Plan, samples: int, sizes: Sizes, strategy: Strategy) -> Memory:
    within = fully_sharded if "dp_shard" in sizes else replicated
    return within.memory(part_of(plan, sizes), samples, sizes, strategy)


def setup(plan: Plan, sizes: Sizes, strategy: Strategy) -> float:
    """Every block is split as it comes; then every block of the parts is sharded."""
    part = part_of(plan, sizes)
    peak = plan.arrival(part.sizes)
    if "dp_shard" in sizes:
        # The first shards are made where all parts are still whole.
        shards = [0.0] * part.num_units
        for unit, size in zip(part.units, part.sizes, strict=True):
            shards[unit] += 4 * size / sizes["dp_shard"]
        peak = max(peak, part.buffers + 4.0 * sum(part.sizes) + max(shards))
    return peak


def part_of(plan: Plan, sizes: Sizes) -> Plan:
    """The same step of one rank's part of the model; ValueError where it cannot be
    divided so."""
    num_parts = sizes["tp"]
    if num_parts not in plan.divided:
        styles = checked_plan(plan.model, num_parts, {})
        plan.divided[num_parts] = plan.of_part(split(plan.model, styles, num_parts))
    return plan.divided[num_parts]


def split(model: nn.Module, plan: Mapping[str, Styles], num_parts: int) -> nn.Module:
    """A rank's part of `model` on the meta device, which has shapes and no values."""
    part = empty_copy(model)
    if num_parts == 1:
        return part
    divided: dict[nn.Parameter, nn.Parameter] = {}  # what is tied stays so
    for name, styles in plan.items():
        layer = part.get_submodule(name)
        dim = split_dim(layer, styles)
        for own_name, parameter in list(layer.named_parameters(recurse=False)):
            if dim is not None and dim < parameter.dim():
                if parameter not in divided:
                    first = parameter.detach().chunk(num_parts, dim)[0]
                    divided[parameter] = nn.Parameter(first, parameter.requires_grad)
                layer.register_parameter(own_name, divided[parameter])
        if isinstance(layer, nn.Embedding):
            layer.padding_idx = None  # it may be a row of another part
        for style in styles:
            for exchange in into(layer, style):
                layer.register_forward_pre_hook(partial(on_input, exchange, num_parts))
            for exchange in out_of(style):
                layer.register_forward_hook(partial(on_output, exchange, num_parts))
    return part


# ---- what ranks with parts of a model send each other ----

Exchange = tuple[Placement, Placement]
"""How a tensor lies before and after it; its gradient goes the other way."""
ENTERING = (Replicate(), Replicate())
"""What is whole goes to layers of which each rank has a part: the gradients that they
give it are summed."""
IS_ENTERING = "is_entering"
"""A mark on a tensor that leaves this to the layer that made it, for all that take
it."""
Change = Callable[[torch.Tensor], torch.Tensor]


def into(layer: nn.Module, style: ParallelStyle) -> Iterator[Exchange]:
    """What a style does to a layer's input."""
    if isinstance(style, ColwiseParallel | RowwiseParallel) and not isinstance(
        layer, nn.Embedding
    ):
        by_columns = isinstance(style, ColwiseParallel)
        yield style.input_layouts[0], Replicate() if by_columns else Shard(-1)


def out_of(style: ParallelStyle) -> Iterator[Exchange]:
    """What a style does to a layer's output."""
    if isinstance(style, ColwiseParallel):
        yield Shard(-1), style.output_layouts[0]
    if isinstance(style, RowwiseParallel):
        yield Partial(), style.output_layouts[0]
    if isinstance(style, PrepareModuleOutput):
        before, after = style.output_layouts[0], style.desired_output_layouts[0]
        if before is not None:
            yield before, after


def on_input(exchange: Exchange, num_parts: int, layer: nn.Module, args: Any) -> Any:
    """A forward pre-hook."""
    x, *rest = args
    if exchange == ENTERING and hasattr(x, IS_ENTERING):
        return None
    return exchanged(x, exchange, num_parts), *rest


def on_output(
    exchange: Exchange, num_parts: int, layer: nn.Module, args: Any, output: Any
) -> Any:
    """A forward hook."""
    output = exchanged(output, exchange, num_parts)
    if exchange[1].is_replicate():
        setattr(output, IS_ENTERING, True)
    return output


def exchanged(x: torch.Tensor, exchange: Exchange, num_parts: int) -> torch.Tensor:
    """`x` in the size that it has after an exchange, with what is made on the way."""
    before, after = exchange

    def gather(dim: int) -> Change:
        return lambda x: torch.cat(torch.cat([x] * num_parts).chunk(num_parts), dim)

    def cut(dim: int) -> Change:
        return lambda x: x.chunk(num_parts, dim)[0].clone()

    there: Change = same
    back: Change = same
    match before, after:
        case Partial(), Replicate():
            there = torch.clone
        case Replicate(), Replicate():
            back = torch.clone
        case ((Partial() | Replicate()), Shard(dim=dim)):
            there, back = cut(dim), gather(dim)
        case Shard(dim=dim), Replicate():
            there, back = gather(dim), cut(dim)
    found: torch.Tensor = Exchanged.apply(x, there, back)
    return found


def same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


class Exchanged(torch.autograd.Function):
    """One change forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Change, back: Change) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient), None, None
