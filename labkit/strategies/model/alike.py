"""Checks that ranks with parts of one model do the same with them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.torch import no_dispatch
from labkit.strategies.autograd.backward import Roots


def check_inputs(leaves: Sequence[Any], mesh: DeviceMesh) -> None:
    """UnsupportedLoopError where ranks along the one axis of `mesh`, which share the
    layers of a model, give it different values. Collective."""
    sums = [
        local_part(each).detach().double().sum()
        for each in leaves
        if isinstance(each, torch.Tensor) and not each.is_complex()
    ]
    if sums and not are_equal(torch.stack(sums), mesh):
        raise UnsupportedLoopError(
            "ranks that share the layers of one model give it different inputs: "
            "each of them computes a part of the same result. Take batches from "
            "the loader that prepare returns, or seed what you draw with the "
            "place along dp, not with rank"
        )


def check_roots(roots: Roots, mesh: DeviceMesh) -> None:
    """UnsupportedLoopError where ranks that share the layers of a model begin a
    backward pass with different values. Collective."""
    sums = [r.detach().double().sum() for r in roots if isinstance(r, torch.Tensor)]
    if sums and not are_equal(torch.stack(sums), mesh):
        raise UnsupportedLoopError(
            "ranks that share the layers of one model have another loss on each, and "
            "each would train its parts for its own. Compute the loss in the same way "
            "on all of them, without rank"
        )


def are_equal(numbers: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether all ranks of the one axis of `mesh` have the same numbers. Collective,
    and no part of what is measured."""
    with no_dispatch():
        both = torch.stack([numbers, -numbers]).nan_to_num()
        dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group())
        return bool((both[0] == -both[1]).all())
