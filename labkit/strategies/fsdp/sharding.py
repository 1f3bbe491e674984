"""Shards a model, a block at a time."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.strategies.mesh.device_mesh import broadcast
from labkit.strategies.model.materialize import move
from labkit.strategies.model.materialize import parts
from labkit.strategies.model.materialize import release
from labkit.strategies.prepared import units


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    is_alike: bool = False,
    **settings: Any,
) -> FSDPModule:
    """Shard `model` in place along the last axis of `mesh`, with the values of its
    first rank; along an axis before it there are replicas. Collective.

    A block at a time comes to `device`, from the meta device too, and is sharded before
    the next: no rank ever has the whole model on it. The blocks are gathered and
    computed in `dtype`; parameters and reduced gradients are fp32, as is the output.
    With `is_alike` nothing is sent: all ranks have what is to be there.
    `settings` are arguments of `fully_shard`. Make the optimizer after it.
    """
    device = device or torch.device(mesh.device_type)
    at_root = {}
    if dtype is not torch.float32 and "mp_policy" not in settings:
        # Gradients are summed over the ranks in fp32, and the loss computed in it.
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        settings["mp_policy"] = policy
        at_root["mp_policy"] = replace(policy, output_dtype=torch.float32)
    outermost = called_ones(model)
    inner = [each for unit in units(model) for each in called_ones(unit)]
    units_of_all = list(dict.fromkeys([*inner, *outermost]))
    root: Any = model
    # The whole comes last.
    for part, tensors in parts(model, [u for u in units_of_all if u is not model]):
        for tensor in tensors:
            move(tensor, device)
            if not is_alike:
                broadcast(local_part(tensor.detach()), mesh)  # as DDP and DeepSpeed do
        special = at_root if part in outermost else {}
        root = fully_shard(takeable(part), mesh=mesh, **{**settings, **special})
        release(tensors, part)
    sharded: FSDPModule = root
    return sharded


def called_ones(module: nn.Module) -> list[nn.Module]:
    """This module, or the ones in it that a loop calls, where it has no forward, as a
    ModuleList: nothing would gather its parameters."""
    if has_forward(module):
        return [module]
    with_parameters = (
        child for child in module.children() if any(True for _ in child.parameters())
    )
    return [each for child in with_parameters for each in called_ones(child)]


def check_calls(model: nn.Module) -> None:
    """UnsupportedLoopError where modules that a loop calls share a parameter: each
    gathers its own."""
    first: dict[int, nn.Module] = {}
    for module in called_ones(model):
        for name, parameter in module.named_parameters():
            if first.setdefault(id(parameter), module) is not module:
                kind = type(model).__name__
                raise UnsupportedLoopError(
                    f"the model, a {kind}, has no forward, so fully_shard gathers the "
                    f"parameters of each module in it by itself, and {name} is in two "
                    "of them; write a torch.nn.Module around them, with a forward that "
                    "calls them, or use ddp"
                )


class Unannounced:
    """Before a class among the bases: that does not hear of the subclass, which it may
    register, or refuse, in `__init_subclass__`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def check_classes(model: nn.Module) -> None:
    """UnsupportedLoopError for a module of a class that `fully_shard` cannot make a
    subclass of: Python does not let its instances have another class."""
    inner = [each for unit in units(model) for each in called_ones(unit)]
    of_kinds = {type(module): module for module in (*inner, *called_ones(model))}
    for kind, module in of_kinds.items():
        try:
            found = type("", (Unannounced, FSDPModule, kind), {})
            object.__setattr__(module, "__class__", found)
            object.__setattr__(module, "__class__", kind)
        except TypeError as error:
            raise UnsupportedLoopError(
                f"fully_shard gives a module a subclass of its class, and those of "
                f"{kind.__name__} cannot have one, as where a class has a base before "
                "torch.nn.Module that has __slots__, like ABC. Let it begin with the "
                f"module: class {kind.__name__}(torch.nn.Module, ABC), or use ddp, "
                "zero1, zero2 or zero3"
            ) from error


def has_forward(module: nn.Module) -> bool:
    forward: Any = type(module).forward
    return forward is not nn.Module.forward


def takeable(module: nn.Module) -> nn.Module:
    """A module as `fully_shard` takes it: of containers, those with a forward."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and not has_forward(module):
        kind: Any = type(module)
        module.__class__ = with_forward(kind)
    return module


@functools.cache
def with_forward(kind: Any) -> Any:
    def forward(self: nn.Module, *args: Any) -> None:
        nn.Module.forward(self, *args)  # which raises NotImplementedError

    return type(kind.__name__, (kind,), {"forward": forward})
