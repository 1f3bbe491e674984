"""Makes the device mesh of a run."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from labkit.compat.c10d import adopt_timeout
from labkit.compat.c10d import timeout_of
from labkit.strategies.mesh.links import forget_links
from labkit.strategies.mesh.sizes import DATA_PARALLEL


def data_parallel_axes(mesh: DeviceMesh) -> DeviceMesh | None:
    """The part of `mesh` along which ranks have samples of their own; None where all
    have the same."""
    names = mesh.mesh_dim_names or ()
    dp = tuple(name for name in names if name in DATA_PARALLEL)
    if not dp:
        return None
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


def build_mesh(sizes: Mapping[str, int], device: torch.device) -> DeviceMesh | None:
    """All ranks along axes of these sizes: see `labkit.strategies.mesh.sizes`. None for
    no axes, as of one rank alone. Collective."""
    if not sizes:
        return None
    return mesh_of(dist.group.WORLD, device.type, tuple(sizes.values()), tuple(sizes))


@lru_cache(maxsize=4)
def mesh_of(
    world: Any, device_type: str, shape: tuple[int, ...], axes: tuple[str, ...]
) -> DeviceMesh:
    """The mesh over the default group `world`: its groups are made once. Collective."""
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=axes)
    for group in mesh.get_all_groups():
        adopt_timeout(group, world)
    return mesh


def forget_groups() -> None:
    """Keep none of the groups that are about to be left, nor their connections."""
    mesh_of.cache_clear()
    another_group.cache_clear()
    group_of_one.cache_clear()
    forget_links()


@lru_cache(maxsize=4)
def another_group(group: Any, mesh: DeviceMesh, axis: str) -> Any:
    """Another group of the ranks of `group`, which are those along an axis of `mesh`;
    over gloo the same. Collective, for all ranks of `mesh`.

    NCCL works off what a rank sends and receives in a group one after the other: two
    ranks that send to each other at once, before they receive, need two.
    """
    if dist.get_backend(group) == "gloo":
        return group
    place = (mesh.mesh_dim_names or ()).index(axis)
    rows = mesh.mesh.movedim(place, -1).reshape(-1, mesh.size(place)).tolist()
    timeout = timeout_of(group)
    groups = [(row, dist.new_group(row, timeout)) for row in rows]
    return next(made for row, made in groups if dist.get_rank() in row)


@lru_cache(maxsize=4)
def group_of_one(world: Any) -> Any:
    """The group of this rank alone, beside the default group `world`."""
    own = [dist.get_rank()]
    return dist.new_group(own, timeout_of(world), use_local_synchronization=True)


def broadcast(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Give all ranks of `mesh` the values of its first, one axis after the other."""
    for axis in reversed(range(mesh.ndim)):
        dist.broadcast(tensor, group=mesh.get_group(axis), group_src=0)
