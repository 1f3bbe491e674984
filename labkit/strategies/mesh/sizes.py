"""Sizes of a mesh's axes, from what a magic line says of them.

Axes are named as torchtitan names them, outermost first: `pp` (stages), `dp_replicate`
and `dp_shard` (replicas, and shards of each), `tp` (parts of a layer).
"""

import math
import re
from collections.abc import Sequence

from labkit.checks import short_repr

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA_PARALLEL = ("dp_replicate", "dp_shard")
"""The axes along which ranks have samples of their own."""


def sizes_of_axes(
    strategy: str,
    axes: Sequence[str],
    outer_axes: Sequence[str],
    mesh: str | None,
    world_size: int,
) -> dict[str, int]:
    """The sizes of `axes`, and of those of `outer_axes` that `mesh` names, outermost
    first; their product is `world_size`.

    `mesh` is as "dp=2,tp=2". An axis that it does not name has size 1, but one of
    `axes`: that has the ranks that are left. ValueError for a mesh that does not hold
    all ranks, or has other axes.
    """
    may_have = [axis for axis in AXES if axis in axes or axis in outer_axes]
    given = parse_mesh(mesh) if mesh is not None else {}
    if not may_have:
        return {}
    if "dp" in given:
        there = [axis for axis in DATA_PARALLEL if axis in may_have]
        if not there or there[-1] in given:
            raise ValueError(
                f"--mesh {mesh}: write dp_replicate and dp_shard, or dp, which is the "
                "last of these that a strategy has, and not both"
            )
        given[there[-1]] = given.pop("dp")
    if others := [axis for axis in given if axis not in may_have]:
        raise ValueError(
            f"--mesh {mesh}: there is no axis {short_repr(others[0])} under "
            f"{strategy}, which has: {', '.join(may_have)}"
        )
    sizes = {axis: given.get(axis, 1) for axis in may_have}
    if not given and len(axes) > 1 and world_size % 2 == 0:
        sizes[axes[0]] = 2  # as many replicas, where nothing is said
    free = [axis for axis in reversed(axes) if axis not in given]
    rest, left = divmod(world_size, math.prod(sizes.values()))
    if free and rest and not left:
        sizes[free[0]] *= rest
    if math.prod(sizes.values()) != world_size:
        shape = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        raise ValueError(
            f"--mesh {mesh}: {shape} has {math.prod(sizes.values())} places for "
            f"{ranks}; choose sizes whose product is {world_size}"
        )
    needed = {*axes}
    if sizes.get("dp_replicate", 1) > 1:
        needed.add("dp_shard")  # or replicas would be taken for shards
    return {axis: size for axis, size in sizes.items() if size > 1 or axis in needed}


def mesh_on_hosts(
    axes: Sequence[str], outer_axes: Sequence[str], ranks_per_host: Sequence[int]
) -> str | None:
    """What `--mesh` says where nothing is said on several hosts: groups of ranks have
    the whole model each, equal ones, as large as they can be with none on two hosts, so
    that what is sent most stays within a host. None for strategies whose mesh has one
    axis, and where groups would be single ranks."""
    size = math.gcd(*ranks_per_host)
    if len(ranks_per_host) == 1 or size == 1:
        return None
    num_groups = sum(ranks_per_host) // size
    if "tp" in axes and outer_axes:
        return f"dp={num_groups},tp={size}"
    if set(DATA_PARALLEL) <= set(axes):
        return f"dp_replicate={num_groups},dp_shard={size}"
    return None


def parse_mesh(mesh: str) -> dict[str, int]:
    """The axes that a magic line names, with their sizes."""
    parts = [re.fullmatch(r"(\w+)=([1-9]\d{0,5})", each) for each in mesh.split(",")]
    found = {part[1]: int(part[2]) for part in parts if part is not None}
    if len(found) < len(parts):
        raise ValueError(
            f"--mesh {short_repr(mesh)}: write axes and their sizes, 1 or more, with "
            "commas and no spaces, each axis once, for example dp=2,tp=2"
        )
    return found
