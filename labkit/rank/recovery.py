"""Models that outlive a failure: bound to the group of today, fit for a next step."""

import gc
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo
from torch.nn.parallel import DistributedDataParallel

Group = dist.ProcessGroup

LOST = "(of a process group that is no more)"
"""The name of a mesh's group that has no successor: torch would find another's."""


class FormerGroups:
    """The process groups that this rank was in, when it left them all."""

    def __init__(self, default: Group, formation: int) -> None:
        """`formation` tells one forming of groups from another, on all ranks alike."""
        world = c10d._world
        self.default = default
        self.formation = formation
        self.names = {group: str(name) for group, name in world.pg_names.items()}
        self.ranks = {
            group: sorted(ranks) for group, ranks in world.pg_group_ranks.items()
        }

    def in_use(self, found: list[Any]) -> dict[str, list[int]]:
        """Name and ranks of those that meshes and what was made with them hold."""
        names = {name for each in found for name in names_of(each)}
        held = {id(group) for each in found for group in groups_of(each).values()}
        return {
            name: self.ranks[group]
            for group, name in self.names.items()
            if group is not self.default and (name in names or id(group) in held)
        }


def bind_to_new_groups(former: FormerGroups | None, default: Group) -> None:
    """Give what is bound to a former group the one that takes its place. Collective.

    Only a group that all of its ranks still have is formed again: a rank that was
    restarted has lost its shards.
    """
    found = models_and_meshes()
    wanted = (0, {}) if former is None else (former.formation, former.in_use(found))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    successors: dict[str, Group] = {}
    for name, ranks in sorted({(n, tuple(r)) for _, w in everyone for n, r in w.items()}):
        theirs = [everyone[rank] for rank in ranks]
        if all(t[0] == theirs[0][0] and t[1].get(name) == list(ranks) for t in theirs):
            successors[name] = dist.new_group(list(ranks))
    if former is None:
        return
    if all(formation == former.formation for formation, _ in everyone):
        successors[former.names.get(former.default, "")] = default
    by_group = {
        group: successors[name]
        for group, name in former.names.items()
        if name in successors
    }
    for each in found:
        if isinstance(each, DeviceMesh):
            rename_groups(each, successors)
        for attribute, group in groups_of(each).items():
            setattr(each, attribute, by_group.get(group, group))
    recover_models(found, is_group_new=True)


def recover_models(
    found: list[Any] | None = None, *, is_group_new: bool = False
) -> None:
    """Take back what a step that failed half-way has left in models."""
    for each in models_and_meshes() if found is None else found:
        if isinstance(each, DistributedDataParallel):
            rebuild_reducer(each)
        elif isinstance(each, FSDPModule):
            reset_fsdp(each, drops_gathers=is_group_new)


def models_and_meshes() -> list[Any]:
    """All that is alive of what holds process groups."""
    kinds = (DistributedDataParallel, FSDPModule, DeviceMesh, DataParallelMeshInfo)
    is_one: dict[type, bool] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in is_one:
            is_one[kind] = issubclass(kind, kinds)
        if is_one[kind]:
            found.append(each)
    return found


def names_of(mesh: Any) -> list[str]:
    """The names by which a DeviceMesh finds its groups."""
    return list(getattr(mesh, "_dim_group_names", []))


def groups_of(holder: Any) -> dict[str, Group]:
    """The groups that a mesh's dimensions have for FSDP, by attribute."""
    if not isinstance(holder, DataParallelMeshInfo):
        return {}
    return {k: v for k, v in vars(holder).items() if isinstance(v, Group)}


def rename_groups(mesh: DeviceMesh, successors: Mapping[str, Group]) -> None:
    if not hasattr(mesh, "_dim_group_names"):
        return
    now = [successors.get(name) for name in mesh._dim_group_names]
    mesh._dim_group_names = [LOST if each is None else each.group_name for each in now]
    mesh._pg_registry.update({g.group_name: g for g in now if g is not None})


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """DDP refuses another step after a backward pass that did not end, and knows no
    other group than it was made with. It can be bound anew when it is unpickled; the
    same two methods do it in place, on the default group."""
    # A constructor that was interrupted leaves one without a reducer.
    if "reducer" not in vars(model):
        return
    model.process_group = c10d._get_default_group()
    hooks, model._comm_hooks = model._comm_hooks, []
    model.__setstate__(model.__getstate__())
    for hook, state in hooks:
        model.register_comm_hook(state, hook)


def reset_fsdp(model: FSDPModule, *, drops_gathers: bool) -> None:
    """Source: `FSDPModule.reset_iter_state`, which waits for what is under way: with
    `drops_gathers` it has gone with its group."""
    state = model._get_fsdp_state()
    for group in state._fsdp_param_groups if drops_gathers else ():
        group._all_gather_result = None
    if state._is_root:
        model.reset_iter_state()
