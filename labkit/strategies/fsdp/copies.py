"""Copies of a sharded model, as for an average of its weights."""

import copy
from collections.abc import Callable
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.data_parallel import as_before_sharding
from labkit.compat.data_parallel import groups_of
from labkit.compat.data_parallel import is_in_forward
from labkit.strategies.fsdp.blocks import gather_plainly

PARAMETERS_FIRST = (
    "copy.deepcopy is to copy an object that has parameters or layers of a sharded "
    "model before it has the model itself, and these would not be those of the copied "
    "model. Copy the model alone, and take them from its copy; or use ddp, under which "
    "parameters are whole on every rank"
)
WITHIN_FORWARD = (
    "a forward pass that is under way, or has failed, has the model's parameters "
    "gathered, of which a copy in parts cannot be made. Copy the model after prepare "
    "and outside of forward, or after the next forward pass; or use ddp, under which "
    "parameters are whole on every rank"
)


def let_copy(
    model: nn.Module,
    shard: Callable[[nn.Module], Any],
    begin: Callable[[], None],
    note: Callable[[], None],
) -> None:
    """Have `copy.deepcopy` of a model, or of a part of it, give one that is sharded
    alike, by `shard`, which sends nothing: torch refuses it. `begin` is called before
    a copy, and `note` also before one of a copy."""
    for module in model.modules():
        copied = partial(plain_mode, sharded_copy, module, shard, begin, note)
        vars(module)["__deepcopy__"] = copied


def plain_mode(copied: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Call it so that what it makes can be used in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        return copied(*args)


def sharded_copy(
    module: nn.Module,
    shard: Callable[[nn.Module], Any],
    begin: Callable[[], None],
    note: Callable[[], None],
    memo: dict[int, Any],
) -> nn.Module:
    """`copy.deepcopy` of it: each rank copies its shards."""
    begin()
    groups = [group for each in module.modules() for group in groups_of(each)]
    check_between_passes(groups)
    for group in groups:
        if not group.is_sharded:
            group.reshard()
    parameters = list(module.parameters())
    if not all(isinstance(each, DTensor) for each in parameters):
        raise UnsupportedLoopError(WITHIN_FORWARD)
    if any(id(each) in memo for each in parameters):
        raise UnsupportedLoopError(PARAMETERS_FIRST)
    note()
    for parameter in parameters:
        blank = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(blank, parameter.requires_grad)
    with as_before_sharding(module):
        made: nn.Module = copy.deepcopy(module, memo)
    shard(made)
    let_copy(made, shard, lambda: None, note)
    for each in made.modules():
        for group in groups_of(each):
            group.pre_forward = partial(gather_plainly, group.pre_forward)
    for ours, theirs in zip(made.parameters(), parameters, strict=True):
        local_part(ours).copy_(local_part(theirs))
        memo[id(theirs)] = ours
    return made


def check_between_passes(groups: Iterable[Any]) -> None:
    """UnsupportedLoopError within a forward pass, which needs what is gathered."""
    if any(map(is_in_forward, groups)):
        raise UnsupportedLoopError(WITHIN_FORWARD)
