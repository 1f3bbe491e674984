"""What outlives a failure: bound to the groups of today, fit for a next step."""

import contextlib
import gc
import sys
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

Group = dist.ProcessGroup

LOST = "(of a process group that is no more)"
"""The name of a mesh's group that has no successor: torch would find another's."""


class FormerGroups:
    """The process groups that this rank was in, when it left them all."""

    def __init__(self, default: Group, formation: int) -> None:
        """`formation` tells one forming of groups from another, on all ranks alike."""
        self.default_name = str(default.group_name)
        self.formation = formation
        self.names = {default: self.default_name}
        self.names |= {g: str(name) for g, name in c10d._world.pg_names.items()}
        self.ranks = {
            name: sorted(c10d._world.pg_group_ranks.get(group, ()))
            for group, name in self.names.items()
        }

    def in_use(
        self, meshes: Iterable[Any], variables: dict[str, Any]
    ) -> dict[str, list[int]]:
        """Name and ranks of those that anything holds, but for the default one."""
        used = {name for mesh in meshes for name in names_of(mesh)}
        for holder in [variables, *holders_of(self.names)]:
            for value in holder.values() if isinstance(holder, dict) else holder:
                if isinstance(value, Group) and value in self.names:
                    used.add(self.names[value])
        return {n: self.ranks[n] for n in used & {*self.ranks} - {self.default_name}}


def bind_to_new_groups(
    former: FormerGroups | None, default: Group, variables: dict[str, Any]
) -> None:
    """Put in the place of every former group that is in use one of today. Collective.

    Only a group that all of its ranks still have is formed again: a rank that was
    restarted has lost its shards. DeepSpeed's engines, FSDP's models and the user's own
    `variables` hold groups; a DeviceMesh knows them by name; DDP made a reducer of one.
    """
    found = models_and_meshes()
    meshes = [each for each in found if isinstance(each, DeviceMesh)]
    wanted = (
        (0, {})
        if former is None
        else (former.formation, former.in_use(meshes, variables))
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    successors: dict[str, Group] = {}
    for name, ranks in sorted(
        {(n, tuple(r)) for _, w in everyone for n, r in w.items()}
    ):
        theirs = [everyone[rank] for rank in ranks]
        if all(t[0] == theirs[0][0] and t[1].get(name) == list(ranks) for t in theirs):
            successors[name] = dist.new_group(list(ranks))
    if former is None:
        return
    if all(formation == former.formation for formation, _ in everyone):
        successors[former.default_name] = default
    for holder in [variables, *holders_of(former.names)]:
        places = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for place, value in list(places):
            if isinstance(value, Group) and value in former.names:
                holder[place] = successors.get(former.names[value], value)
    for mesh in meshes:
        rename_groups(mesh, successors)
    if meshes:
        # It takes 0.8 s to load, which an engine without meshes has no use for.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # It holds results with meshes of before, for whatever mesh is equal to one.
        _clear_sharding_prop_cache()
    recover_models(found, is_group_new=True)


def recover_models(
    found: list[Any] | None = None, *, is_group_new: bool = False
) -> None:
    """Take back what a step that failed half-way has left in models.

    To be called on all ranks: DDP's buckets begin anew, and are to be equal.
    """
    for each in models_and_meshes() if found is None else found:
        # One that cannot be recovered says so when it is used.
        with contextlib.suppress(Exception):
            if isinstance(each, DistributedDataParallel):
                rebuild_reducer(each)
            elif isinstance(each, FSDPModule):
                reset_fsdp(each, drops_gathers=is_group_new)


def models_and_meshes() -> list[Any]:
    """All that are alive and know of process groups."""
    kinds = (DistributedDataParallel, FSDPModule, DeviceMesh)
    is_one: dict[type, bool] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in is_one:
            is_one[kind] = issubclass(kind, kinds)
        if is_one[kind]:
            found.append(each)
    return found


def holders_of(groups: Mapping[Group, str]) -> list[Any]:
    """The dicts and lists, also those of objects' attributes, that hold `groups`."""
    holders = []
    for each in gc.get_referrers(*groups):
        if isinstance(each, dict | list):
            holders.append(each)
        elif isinstance(inner := getattr(each, "__dict__", None), dict):
            holders.append(inner)
    return holders


def names_of(mesh: Any) -> list[str]:
    """The names by which a DeviceMesh finds its groups."""
    return [str(name) for name in getattr(mesh, "_dim_group_names", [])]


def rename_groups(mesh: Any, successors: Mapping[str, Group]) -> None:
    if names := names_of(mesh):
        now = [successors.get(name) for name in names]
        mesh._dim_group_names = [LOST if g is None else g.group_name for g in now]
        mesh._pg_registry.update({g.group_name: g for g in now if g is not None})


def forget_lost_groups() -> None:
    """Have DeepSpeed make its copy of the default group again, if that has gone."""
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    if groups is not None and groups._WORLD_GROUP not in c10d._world.pg_map:
        groups._WORLD_GROUP = None


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """DDP refuses another step after a backward pass that did not end, and its reducer
    knows no other group than it was made with. It can be made anew when DDP is
    unpickled, on the default group; the same two methods do it in place."""
    if model.process_group is not c10d._get_default_group():
        return
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
