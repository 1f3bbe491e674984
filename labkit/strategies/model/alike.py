"""Checks that ranks that train one model have the same of it, and do the same."""

import zlib
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.torch import no_dispatch
from labkit.compat.torch import tree_leaves
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.model.fingerprints import fingerprints
from labkit.strategies.model.states import parameters_of


def check_states(optimizer: torch.optim.Optimizer, team: Peers) -> None:
    """Give what an optimizer keeps of its parameters the values of the first rank of
    `team`, as a model has them. Collective.

    UnsupportedLoopError where ranks keep other things; nothing has changed then.
    """
    if team.size == 1:
        return
    kept: list[dict[str, Any]] = [
        optimizer.state.get(parameter, {}) for parameter in parameters_of(optimizer)
    ]
    facts = [
        (key, [as_fact(leaf) for leaf in tree_leaves(value)])
        for state in kept
        for key, value in state.items()
    ]
    of = sum(map(bool, kept))
    number = zlib.crc32(repr(facts).encode())
    most, least, number, other = team.greatest([of, -of, number, -number])
    if number != -other:
        states = (
            f"of {most} parameters on one rank and of {-least} on another"
            if most != -least
            else f"of {most} parameters, and not the same of each on every rank"
        )
        raise UnsupportedLoopError(
            f"the optimizer holds states, such as momentum, {states}: ranks have "
            "trained it differently, or some are new. Make the model and the optimizer "
            "again on all ranks, and load into both what they are to continue from, or "
            "continue a run with --resume"
        )
    for leaf in tree_leaves(kept):
        # Of a DTensor each rank has its own part.
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
            receive_bytes(leaf, team)


def take_values(model: nn.Module, team: Peers) -> None:
    """Give a model the values of the first rank of `team`, where they are others: each
    rank is to keep but some of them. Collective."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    # For a seed that all ranks have nothing is sent.
    own = sum(int(fingerprints([tensor])) for tensor in tensors)
    if team.size == 1 or team.agree_on(own % 2**62):
        return
    for tensor in tensors:
        receive_bytes(tensor, team)


def receive_bytes(tensor: torch.Tensor, team: Peers) -> None:
    """Give it the values of the first rank of `team`. Collective."""
    sent = tensor.detach().to(team.device).contiguous()
    # As bytes: a backend knows but some dtypes.
    team.broadcast(sent.view(-1).view(torch.uint8))
    tensor.detach().copy_(sent)


def as_fact(leaf: Any) -> Any:
    """What has to be the same on every rank of a part of a state."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    is_plain = leaf is None or isinstance(leaf, bool | int | float | str)
    return leaf if is_plain else type(leaf).__name__


NESTED = (
    "the loop gives the model a nested tensor, of samples of different lengths, and "
    "layers cannot compute with one under {strategy}. Pad the samples to one length, "
    "with torch.nested.to_padded_tensor, or use ddp, zero1, zero2 or fsdp"
)


def check_nested(leaves: Iterable[Any], strategy: str) -> None:
    """UnsupportedLoopError where one of them is a nested tensor."""
    if any(isinstance(each, torch.Tensor) and each.is_nested for each in leaves):
        raise UnsupportedLoopError(NESTED.format(strategy=strategy))


def check_inputs(leaves: Sequence[Any], mesh: DeviceMesh) -> None:
    """UnsupportedLoopError where ranks along the one axis of `mesh`, which share the
    layers of a model, give it different values. Collective."""
    check_nested(leaves, "tensor or pipeline")
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


OTHER_LOSS = (
    "ranks that share the layers of one model have different losses, and each would "
    "train its part of the layers for its own loss. Compute the loss in the same way "
    "on all of them, without rank"
)


def check_roots(roots: Iterable[Any], mesh: DeviceMesh, why: str = OTHER_LOSS) -> None:
    """UnsupportedLoopError, in the words of `why`, where ranks that share the layers of
    a model begin a backward pass with different values. Collective."""
    sums = [r.detach().double().sum() for r in roots if isinstance(r, torch.Tensor)]
    if sums and not are_equal(torch.stack(sums), mesh):
        raise UnsupportedLoopError(why)


def are_equal(numbers: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether all ranks of the one axis of `mesh` have the same numbers. Collective,
    and no part of what is measured."""
    with no_dispatch():
        both = torch.stack([numbers, -numbers]).nan_to_num()
        dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group())
        return bool((both[0] == -both[1]).all())
