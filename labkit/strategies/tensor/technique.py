"""What a split model needs in backward passes and steps."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import unfollow
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.model.shards import check_parts
from labkit.strategies.model.shards import patch_dtensor
from labkit.strategies.model.shards import shapes_of_parts
from labkit.strategies.optimizers.elementwise import check_elementwise
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Norm
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import check_keys
from labkit.strategies.prepared import optimizer_tensors

REPLACED = (
    "{name} was replaced since prepare, by a parameter or a layer that is whole, and "
    "tensor has split it: what it computes is no part of what the other layers take. "
    "Give the parameter that was there other values, after optimizer.step() and under "
    "torch.no_grad(), or replace it before prepare; or use ddp"
)


class TensorParallel(Prepared):
    """Split layers among ranks that have the same samples.

    Forward: a layer that is split by columns computes a part of its output on each
    rank, one that is split by rows takes such a part, and the outputs are summed with
    an all-reduce. Backward: the same, the other way round, for gradients of inputs.

    Source: Shoeybi et al., "Megatron-LM", 2019;
    `torch.distributed.tensor.parallel.parallelize_module`.
    """

    def place(self) -> None:
        """It was split where it lies."""

    def wrap(self) -> None:
        check_keys(self.options.config, [], self.strategy.name)
        check_elementwise(self.optimizer)
        patch_dtensor()
        self._parameters = dict(self.module.named_parameters())
        self._shapes = shapes_of_parts(self._parameters)
        follow(self)
        self._undo.append(lambda: unfollow(self))
        self._undo.append(wrap_forward(self.module, self._told))
        self.autocast()

    def _told(self, plain: Forward) -> Forward:
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return plain(module, *args, **kwargs)
            except RuntimeError as error:
                if module is self.module and (name := self._replaced()):
                    raise UnsupportedLoopError(REPLACED.format(name=name)) from error
                raise

        return forward

    def _replaced(self) -> str | None:
        """The name of a parameter that was split, and is whole or away."""
        named = dict(self.module.named_parameters())
        for name, parameter in self._parameters.items():
            was_split = isinstance(parameter, DTensor)
            if was_split and not isinstance(named.get(name), DTensor):
                return name
        return None

    def check_layout(self) -> None:
        check_parts(self._parameters, self._shapes)

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        assert self.division is not None
        self.division.begin_backward(roots)
        ours = set(map(id, used))
        flags = [id(parameter) in ours for parameter in self.given_parameters]
        self.agree(flags, alike=flags)

    def end_backward(self, *, has_failed: bool) -> None:
        if not has_failed:
            settle_gradients(self.given_parameters)

    def step(self, closure: Closure | None = None) -> Norm | None:
        self.note_step()
        return super().step(closure)

    def replicas(self) -> dict[str, torch.Tensor]:
        assert self.division is not None
        named = dict(self.module.named_parameters())
        whole = {name: local_part(named[name]) for name in sorted(self.division.whole)}
        return self.counted() | whole

    def memory(self) -> dict[str, Tensors]:
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return {
            "parameters": [local_part(each) for each in tensors],
            "gradients": [local_part(each.grad) for each in self.module.parameters()],
            "optimizer_state": map(local_part, optimizer_tensors(self.optimizer)),
        }


def settle_gradients(parameters: Sequence[Any]) -> None:
    """Lay each gradient out as its parameter is: that of a norm over a part of the
    sequence is a sum over the ranks, which nobody has taken yet. Collective."""
    for parameter in parameters:
        gradient = parameter.grad
        if (
            isinstance(gradient, DTensor)
            and gradient.placements != parameter.placements
        ):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
