"""Parameters of which each rank has those of its own stage."""

import sys
from typing import Any

import torch

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import BOOKKEEPING
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import is_within_backward
from labkit.compat.torch import tree_map_only
from labkit.strategies.mesh.collectives import is_collective
from labkit.strategies.model.gradients import PartitionedParameter
from labkit.strategies.model.gradients import is_of_cell
from labkit.strategies.model.gradients import is_of_compiler
from labkit.strategies.model.gradients import owner_of
from labkit.strategies.relay.elsewhere import COLLECTIVE
from labkit.strategies.relay.elsewhere import Elsewhere
from labkit.strategies.relay.elsewhere import compute
from labkit.strategies.relay.elsewhere import leaves_of


class StagedParameter(PartitionedParameter):
    """A parameter that the ranks of its stage have; on the others it has its shape.

    Within the model's forward pass it is used where its layer is. A cell that computes
    with it elsewhere, as for a penalty or an average of weights, gets it whole, from
    then on after every step: on all ranks, which must all ask.
    """

    is_absent = False
    """Whether this rank does not have it."""
    stage: int | None = None
    """The one that has it, if one has it alone."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func in HARMLESS:
                return func(*args, **kwargs)
            leaves = leaves_of(args, kwargs)
            ours = [leaf for leaf in leaves if isinstance(leaf, StagedParameter)]
            owner: Any = owner_of(ours[0]) if ours else None
            if owner is None:
                return func(*args, **kwargs)
            relay = owner.relay
            if relay.is_inside and is_collective(func):
                raise UnsupportedLoopError(COLLECTIVE)
            if relay.is_between_layers:
                return relay.compute(func, args, kwargs)
            # Activations may be computed again within a backward pass, which a mode for
            # dispatch sees by itself, with operators.
            is_in_pass = relay.is_inside or is_within_backward()
            is_of_python = relay.is_inside or not hasattr(func, "overloadpacket")
            if any(type(leaf) is Elsewhere for leaf in leaves) or (
                is_in_pass and is_of_python and any(p.is_absent for p in ours)
            ):
                return compute(func, args, kwargs)
            if not is_in_pass and is_of_cell(sys._getframe(1)):
                owner.gather(ours)
                if torch.is_grad_enabled() and func not in KEEPS:
                    # Every rank computes it, and the gradients of those are summed.
                    args, kwargs = tree_map_only(
                        StagedParameter, relay.shared_out, (args, kwargs)
                    )
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        if id(self) not in memo and (owner := owner_of(self)) is not None:
            owner.gather([self])
        return super().__deepcopy__(memo)

    @property
    def grad(self) -> torch.Tensor | None:
        frame = sys._getframe(1)
        is_cell = is_of_cell(frame) and not is_of_compiler(frame)
        if is_cell and not is_within_backward():
            return super().grad
        found: torch.Tensor | None = _grad.__get__(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if is_of_cell(sys._getframe(1)) and not is_within_backward():
            PartitionedParameter.grad.__set__(self, value)  # type: ignore[attr-defined]
        else:
            _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


_tensor: Any = torch.Tensor
KEEPS = {_tensor.data.__get__, _tensor.data.__set__, _tensor.detach, _tensor.detach_}
"""Functions of a parameter that are out of autograd's sight."""
_grad: Any = torch.Tensor.grad
HARMLESS = {
    _tensor.dim,
    _tensor.nelement,
    _tensor.numel,
    _tensor.size,
    _tensor.stride,
    _tensor.__len__,
    _tensor.is_floating_point,
    _tensor.is_contiguous,
    _tensor.requires_grad_,
    _tensor.untyped_storage,
    _tensor.element_size,
    _tensor.is_complex,
    _tensor.register_hook,
    _tensor.register_post_accumulate_grad_hook,
    _tensor.requires_grad.__set__,
    *(
        getattr(_tensor, name).__get__
        for name in (
            *("device", "dtype", "grad_fn", "is_cuda", "is_leaf", "layout"),
            *(
                "ndim",
                "requires_grad",
                "shape",
                "is_meta",
                "is_sparse",
                "nbytes",
                *BOOKKEEPING,
            ),
        )
    ),
}


def is_absent(parameter: torch.nn.Parameter) -> bool:
    """Whether another rank has this parameter, and this one its shape."""
    return isinstance(parameter, StagedParameter) and parameter.is_absent


def pipeline_of(model: torch.nn.Module) -> Any:
    """What has a model in stages; None where it is in one piece."""
    for parameter in model.parameters():
        if isinstance(parameter, StagedParameter):
            return owner_of(parameter)
    return None
