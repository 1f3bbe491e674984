"""Makes the device mesh of a run.

Axes are named as torchtitan names them, in this order, outermost first: `pp` (stages),
`dp_replicate` and `dp_shard` (replicas, and shards of each), `tp` (parts of a layer).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

DATA_PARALLEL = ("dp_replicate", "dp_shard")
"""The axes along which ranks have samples of their own."""


def data_parallel_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The part of `mesh` along which ranks have samples of their own."""
    names = mesh.mesh_dim_names or ()
    dp = tuple(name for name in names if name in DATA_PARALLEL)
    return mesh if dp == names else mesh[dp]


def part_of_model(mesh: DeviceMesh | None) -> int:
    """The number of this rank's place along the axes that divide the model: ranks with
    the same one have the same layers."""
    if mesh is None:
        return 0
    number = 0
    for name in mesh.mesh_dim_names or ():
        if name not in DATA_PARALLEL:
            number = number * mesh[name].size() + mesh.get_local_rank(name)
    return number


def build_mesh(
    axes: tuple[str, ...],
    sizes: Sequence[int] | None,
    device: torch.device,
) -> DeviceMesh | None:
    """All ranks, along `axes`; of `sizes` if there are any. None for no axes, as of
    one rank alone. Collective.

    ValueError if it does not hold all ranks.
    """
    if not axes:
        return None
    world_size = dist.get_world_size()
    shape = mesh_shape(axes, sizes or default_sizes(axes, world_size), world_size)
    return mesh_of(dist.group.WORLD, device.type, shape, axes)


@lru_cache(maxsize=4)
def mesh_of(
    world: Any, device_type: str, shape: tuple[int, ...], axes: tuple[str, ...]
) -> DeviceMesh:
    """The mesh over the default group `world`: its groups are made once. Collective."""
    return init_device_mesh(device_type, shape, mesh_dim_names=axes)


def default_sizes(axes: tuple[str, ...], world_size: int) -> tuple[int, ...]:
    """Of a mesh where `--config` has none: all ranks on one axis; where there are
    replicas two of half of the ranks, one where they are odd in number."""
    if len(axes) == 1:
        return (world_size,)
    num_replicas = 2 if world_size % 2 == 0 else 1
    return num_replicas, world_size // num_replicas


def mesh_shape(
    axes: tuple[str, ...], sizes: Sequence[int], world_size: int
) -> tuple[int, ...]:
    """`sizes` as a mesh's shape; ValueError if it does not hold all ranks."""
    shape = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    is_whole = all(isinstance(size, int) and size > 0 for size in shape)
    if not is_whole or len(shape) != len(axes) or math.prod(shape) != world_size:
        kind = "(replicate, shard)" if len(axes) == 2 else "(shard,)"
        raise ValueError(
            f'--config: "mesh" is {shape}; it must be {kind} sizes whose product is '
            f"the number of ranks, {world_size}"
        )
    return shape


def broadcast(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Give all ranks of `mesh` the values of its first, one axis after the other."""
    for axis in reversed(range(mesh.ndim)):
        dist.broadcast(tensor, group=mesh.get_group(axis), group_src=0)
