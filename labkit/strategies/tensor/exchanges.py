"""What ranks with parts of a model's layers send each other, by formula."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import PrepareModuleOutput
from torch.distributed.tensor.parallel import RowwiseParallel

from labkit.strategies.prepared import blocks
from labkit.strategies.tensor.plan import Styles
from labkit.theory import ring


@dataclass(frozen=True)
class Exchange:
    """What is sent once in a pass for each row of a layer's input; all its elements but
    those along the last dimension are rows."""

    layer: str
    columns: int
    num_rings: int = 1
    """2 for an all-reduce, 1 for a gather or a reduce-scatter."""
    is_for_input: bool = False
    """The gradient of an input that the layer itself lays out, if it has one."""
    is_repeated: bool = False
    """In the backward pass, where activations are computed again; of a block's last
    layer nothing is, as nobody needs its output."""
    is_fp32: bool = False
    """Under autocast, which leaves embeddings and norms in fp32, and casts an input
    where it is used."""


def exchanges(model: nn.Module, plan: Mapping[str, Styles]) -> Iterator[Exchange]:
    """Those of PyTorch's styles, in a forward and a backward pass.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3; for sequences Korthikanti
    et al., "Reducing Activation Recomputation", 2022, section 4.2.2.
    """
    in_blocks = [layers_in(block, model, plan) for block in blocks(model)]
    inside = {name for names in in_blocks for name in names[:-1]}
    for name, styles in plan.items():
        layer: Any = model.get_submodule(name)
        forward = partial(Exchange, name, is_repeated=name in inside)
        is_table = isinstance(layer, nn.Embedding)
        for style in styles:
            is_whole = all(
                p.is_replicate() for p in getattr(style, "output_layouts", ())
            )
            width = rows_end_with(layer)
            if isinstance(style, RowwiseParallel):
                # A sum over the ranks: whole, or each has its part of a sequence, whose
                # gradient is gathered.
                yield forward(width, 2 if is_whole else 1, is_fp32=is_table)
                if not is_whole:
                    yield Exchange(name, width, is_fp32=is_table)
            elif isinstance(style, ColwiseParallel):
                if is_whole:
                    yield forward(width)
                if not is_table:
                    fan_in = layer.in_features
                    yield Exchange(name, fan_in, 2, is_for_input=True, is_fp32=True)
            elif isinstance(style, PrepareModuleOutput):
                yield Exchange(name, width, 2 if is_whole else 1, is_fp32=True)
                if not is_whole:  # it is gathered, and its gradient scattered
                    yield forward(width, is_fp32=True)


def layers_in(
    block: nn.Module, model: nn.Module, plan: Mapping[str, Styles]
) -> list[str]:
    """The layers of a plan that are in a block, in the order of their definition."""
    inside = set(block.modules())
    return [n for n, m in model.named_modules() if n in plan and m in inside]


def rows_end_with(layer: Any) -> int:
    """The elements of a row of a layer's output."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, nn.Embedding):
        return layer.embedding_dim
    width: int = next(layer.parameters()).shape[-1]
    return width


class Traffic:
    """The exchanges of a model's passes, with the sizes of what it is given."""

    def __init__(self, model: nn.Module, plan: Mapping[str, Styles]) -> None:
        """`model` is the whole one."""
        self._exchanges = list(exchanges(model, plan))
        self._rows: dict[str, int] = {}
        self._lays_out_input: set[str] = set()

    def watch(self, model: nn.Module) -> list[Callable[[], None]]:
        """See the sizes in the first pass that is trained with."""
        hooks = []
        for name in {each.layer for each in self._exchanges}:
            layer = model.get_submodule(name)
            look = partial(self._look, name)
            # Before that which lays out the input.
            hooks.append(layer.register_forward_pre_hook(look, prepend=True).remove)
        return hooks

    def _look(self, name: str, layer: nn.Module, args: Any) -> None:
        if name in self._rows or not torch.is_grad_enabled() or not args:
            return
        (given, *_) = args
        is_table = isinstance(layer, nn.Embedding)
        self._rows[name] = given.numel() // (1 if is_table else given.shape[-1])
        if not isinstance(given, DTensor) and given.requires_grad:
            self._lays_out_input.add(name)

    def num_bytes(
        self, num_parts: int, width: int, *, has_autocast: bool, recomputes: bool
    ) -> float:
        """That a rank sends in both passes, with `width` bytes for an element; with
        `recomputes` what blocks send in forward they send again in backward."""
        total = 0.0
        for each in self._exchanges:
            if each.is_for_input and each.layer not in self._lays_out_input:
                continue
            rows = self._rows.get(each.layer, 0)
            elements = rows * each.columns * (1 + (recomputes and each.is_repeated))
            total += each.num_rings * ring(
                elements, num_parts, 4 if has_autocast and each.is_fp32 else width
            )
        return total
