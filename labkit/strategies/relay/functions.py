"""What passes between stages, as functions that autograd takes backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any
from typing import Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import get_gradient_edge

from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import no_dispatch
from labkit.strategies.relay.elsewhere import elsewhere


class Ranks(Protocol):
    """The ranks along `pp`, as one of them sees them: a `Relay`."""

    rank: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup: ...
    def send(self, tensor: torch.Tensor, to: int) -> None: ...
    def receive(self, shape: Any, dtype: torch.dtype, source: int) -> torch.Tensor: ...


class Send(torch.autograd.Function):
    """Forward: send a tensor. Backward: receive its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, relay: Ranks, to: int) -> torch.Tensor:
        ctx.relay, ctx.to, ctx.like = relay, to, (tensor.shape, tensor.dtype)
        relay.send(tensor, to)
        return torch.empty_like(tensor, device="meta")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.relay.receive(*ctx.like, ctx.to), None, None


class Receive(torch.autograd.Function):
    """Forward: receive a tensor. Backward: send its gradient."""

    @staticmethod
    def forward(
        ctx: Any, stand_in: Any, relay: Ranks, source: int, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.relay, ctx.source, ctx.dtype = relay, source, dtype
        with DisableTorchFunctionSubclass():
            ctx.like = torch.empty(stand_in.shape, dtype=stand_in.dtype, device="meta")
            return relay.receive(stand_in.shape, dtype, source)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.relay.send(gradient.to(ctx.dtype), ctx.source)
        return torch.empty_like(ctx.like), None, None, None


class Received(torch.autograd.Function):
    """Forward and backward: identity, of what a stage has received for it alone: a
    layer may write to it, as to what another layer has computed, and not to a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data  # no view: to one of a leaf it may not write either

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.contiguous()  # torch sends it as it is


class Enter(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce, for each stage has the gradient of what
    it does with an input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, relay: Ranks) -> torch.Tensor:
        ctx.relay = relay
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.relay.group)
        return total, None


class Leave(torch.autograd.Function):
    """Forward: broadcast from the rank that has an output. Backward: identity there,
    for all ranks have computed the same gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Any,
        anchor: torch.Tensor,
        relay: Ranks,
        source: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.is_source = relay.rank == source
        with DisableTorchFunctionSubclass():
            if ctx.is_source:
                found = tensor.contiguous().clone()
            else:
                ctx.like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                found = torch.empty(tensor.shape, dtype=dtype, device=relay.device)
            dist.broadcast(found, group=relay.group, group_src=source)
        if not found.is_floating_point() and not found.is_complex():
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        own = gradient if ctx.is_source else torch.empty_like(ctx.like)
        return own, None, None, None, None


class Everywhere(torch.autograd.Function):
    """Forward: identity, of what every rank computes. Backward: each adds its share of
    the gradient, for they are summed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / ctx.size, None


Edge = GradientEdge | None
"""Of a tensor's history; None of one without."""


def edge_of(tensor: torch.Tensor) -> Edge:
    with DisableTorchFunctionSubclass():
        return get_gradient_edge(tensor) if tensor.requires_grad else None


def edges_used(output: torch.Tensor, inputs: Sequence[Edge]) -> list[bool]:
    """Which of `inputs` get a gradient in a backward pass from `output`."""
    trained = [each for each in inputs if each is not None]
    if not trained or not output.requires_grad:
        return [False] * len(inputs)
    with DisableTorchFunctionSubclass():
        total = output.sum()
    # With torch functions: a checkpoint within the layer runs a part of it again.
    with no_dispatch():
        found = torch.autograd.grad(
            total, trained, retain_graph=True, allow_unused=True
        )
    gradients = iter(found)
    return [each is not None and next(gradients) is not None for each in inputs]


@dataclass(frozen=True)
class Shapes:
    """The outputs of a layer that another rank has."""

    kinds: list[tuple[tuple[int, ...], torch.dtype, bool]]
    used: list[list[bool]]
    """By output, which of the layer's inputs get a gradient from it."""

    @classmethod
    def of(
        cls, outputs: Sequence[torch.Tensor], used: Sequence[Sequence[bool]]
    ) -> "Shapes":
        kinds = [(tuple(t.shape), t.dtype, t.requires_grad) for t in outputs]
        return cls(kinds, [*map(list, used)])

    def made(
        self, inputs: Sequence[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        """New ones, with gradients for `inputs`."""
        with DisableTorchFunctionSubclass(), no_dispatch():
            # A parameter of that layer would ask for a gradient, too.
            anchor = torch.empty((), device="meta").requires_grad_()
            found = [
                _Layer.apply(kind, anchor, *compress(inputs, used))
                for kind, used in zip(self.kinds, self.used, strict=True)
            ]
            return [elsewhere(each, device) for each in found]


class _Layer(torch.autograd.Function):
    """Forward and backward: shapes, of an output of a layer that another rank runs."""

    @staticmethod
    def forward(ctx: Any, kind: Any, anchor: Any, *inputs: torch.Tensor) -> Any:
        ctx.like = [torch.empty_like(each, device="meta") for each in inputs]
        shape, dtype, is_trained = kind
        output = torch.empty(shape, dtype=dtype, device="meta")
        if not is_trained:
            ctx.mark_non_differentiable(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None, None, *map(torch.empty_like, ctx.like)
