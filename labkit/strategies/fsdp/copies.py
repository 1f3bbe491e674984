"""Copies of a sharded model, as for an average of its weights."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.compat.c10d import local_part
from labkit.compat.data_parallel import as_before_sharding
from labkit.compat.data_parallel import groups_of


def let_copy(
    model: nn.Module, shard: Callable[[nn.Module], Any], begin: Callable[[], None]
) -> None:
    """Have `copy.deepcopy` of a model that `shard` has sharded, or of a part of it,
    give one that is sharded alike, which torch refuses. `begin` is called before."""
    for module in model.modules():
        vars(module)["__deepcopy__"] = partial(sharded_copy, module, shard, begin)


def sharded_copy(
    module: nn.Module,
    shard: Callable[[nn.Module], Any],
    begin: Callable[[], None],
    memo: dict[int, Any],
) -> nn.Module:
    """`copy.deepcopy` of it: each rank copies its shards. Collective."""
    begin()
    for each in module.modules():
        for group in groups_of(each):
            if not group.is_sharded:
                group.reshard()
    parameters = list(module.parameters())
    for parameter in parameters:
        blank = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(blank, parameter.requires_grad)
    with as_before_sharding(module):
        made: nn.Module = copy.deepcopy(module, memo)
    shard(made)
    let_copy(made, shard, begin=lambda: None)
    with torch.no_grad():
        for ours, theirs in zip(made.parameters(), parameters, strict=True):
            local_part(ours).copy_(local_part(theirs))
    return made
