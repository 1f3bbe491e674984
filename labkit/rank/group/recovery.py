"""What outlives a failure: bound to the groups of today, fit for a next step."""

import contextlib
import gc
import json
import weakref
from collections.abc import Iterable
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any
from typing import NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import forget_shardings
from labkit.compat.c10d import group_names_of
from labkit.compat.c10d import names_of_groups
from labkit.compat.c10d import ranks_of
from labkit.compat.c10d import set_groups_of
from labkit.compat.data_parallel import remake_reducer
from labkit.compat.data_parallel import reset_step
from labkit.strategies.mesh.worlds import MODEL
from labkit.strategies.mesh.worlds import SAMPLER
from labkit.strategies.mesh.worlds import WRAPPED
from labkit.strategies.prepared import Prepared

Group = dist.ProcessGroup

LOST = "(of a process group that no longer exists)"
"""The name of a mesh's group that has no successor: torch would find another's."""
ASIDE = "(of all ranks, which are in groups of some now, {}) "
"""So begins the name of one that may have a successor later."""

_later: list[Any] = []
"""Made after the libraries were frozen: frozen only if a cell has done so."""


_over: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""The models in parts whose groups have no successors, and why."""


def check_groups_of(model: nn.Module) -> None:
    """ValueError for one in parts whose groups have no successors."""
    for part in model.modules():
        if part in _over:
            raise ValueError(_over[part])


def freeze_libraries() -> None:
    """What is here now stays: no collection need look at it again, nor a failed cell
    for tensors in it."""
    global _later
    gc.freeze()
    _later = []


class FormerGroups:
    """The process groups that this rank was in, when it left them all."""

    def __init__(self, default: Group, formation: str) -> None:
        """`formation` names the creation of the group, the same on all ranks."""
        self.default_name = str(default.group_name)
        self.formation = formation
        self.mark = ""
        """What every name here begins with, once they are set aside."""
        self.names = {default: self.default_name}
        self.names |= names_of_groups()
        self.ranks = {name: ranks_of(group) for group, name in self.names.items()}

    def set_aside(self) -> None:
        """Let nothing of today find these groups, until there are successors.

        The groups of today have the same names: they are counted from 0 again.
        """
        mark = self.mark = ASIDE.format(self.formation)
        for mesh in models_and_meshes():
            if isinstance(mesh, DeviceMesh) and (names := group_names_of(mesh)):
                ours = [mark + n if n in self.ranks else n for n in names]
                set_groups_of(mesh, ours, {})
        self.default_name = mark + self.default_name
        self.names = {group: mark + name for group, name in self.names.items()}
        self.ranks = {mark + name: ranks for name, ranks in self.ranks.items()}
        forget_shardings()

    def let_go(self, lab: str) -> None:
        """Let nothing find these groups any more: there are no successors. A model that
        needs them says so where it is called, and a sampler that divides its samples
        by their ranks where it is iterated over; `lab` is theirs, in words."""
        for each in models_and_meshes():
            if isinstance(each, DeviceMesh):
                names = group_names_of(each)
                if any(name in self.ranks for name in names):
                    set_groups_of(each, [LOST for _ in names], {})
            elif isinstance(each, DistributedSampler):
                if each.num_replicas > 1:
                    refuse_iteration(each, SAMPLER.format(lab=lab))
            elif not isinstance(each, Prepared) or each.has_parts:
                model = each.module if isinstance(each, Prepared) else each
                is_whole = isinstance(model, DistributedDataParallel)
                why = (WRAPPED if is_whole else MODEL).format(lab=lab)
                model.register_forward_pre_hook(partial(refuse, why), prepend=True)
                if not is_whole:
                    _over[model] = why
        forget_shardings()

    def in_use(
        self, meshes: Iterable[Any], variables: dict[str, Any]
    ) -> dict[str, list[int]]:
        """Name and ranks of those still referenced, except the default one."""
        used = {name for mesh in meshes for name in group_names_of(mesh)}
        for holder in [variables, *holders_of(self.names)]:
            for value in holder.values() if isinstance(holder, dict) else holder:
                if isinstance(value, Group) and value in self.names:
                    used.add(self.names[value])
        return {n: self.ranks[n] for n in used & {*self.ranks} - {self.default_name}}


def bind_to_new_groups(
    former: FormerGroups | None,
    default: Group,
    variables: dict[str, Any],
    store: dist.Store,
    timeout: timedelta,
) -> None:
    """Put in the place of every former group that is in use one of today, whose
    collectives wait for `timeout`. Collective.

    Only a group that all of its ranks still have is re-created: a rank that was
    restarted has lost its shards. DeepSpeed's engines, FSDP's models and the user's own
    `variables` hold groups; a DeviceMesh knows them by name; DDP made a reducer of one.
    """
    found = models_and_meshes()
    meshes = [each for each in found if isinstance(each, DeviceMesh)]
    wanted: tuple[str, dict[str, list[int]]] = ("", {})
    if former is not None:
        # By the names that they had: a rank that was in no part has set none aside.
        used = former.in_use(meshes, variables).items()
        wanted = former.formation, {n.removeprefix(former.mark): r for n, r in used}
    store.set(f"wanted/{dist.get_rank()}", json.dumps(wanted))
    keys = [f"wanted/{rank}" for rank in range(dist.get_world_size())]
    everyone: list[Any] = list(map(json.loads, store.multi_get(keys)))
    successors: dict[str, Group] = {}
    for name, ranks in sorted(
        {(n, tuple(r)) for _, w in everyone for n, r in w.items()}
    ):
        theirs = [everyone[rank] for rank in ranks]
        if all(t[0] == theirs[0][0] and t[1].get(name) == list(ranks) for t in theirs):
            made = dist.new_group(list(ranks), timeout)
            # Others can have its name: in a mesh that another rank has pickled.
            if dist.get_rank() in ranks:
                successors[name] = made
    if former is None:
        return
    successors = {former.mark + name: each for name, each in successors.items()}
    if all(formation == former.formation for formation, _ in everyone):
        successors[former.default_name] = default
    for holder in [variables, *holders_of(former.names)]:
        places = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for place, value in list(places):
            if isinstance(value, Group) and value in former.names:
                holder[place] = successors.get(former.names[value], value)
    for mesh in meshes:
        if not is_aside(mesh, former):
            rename_groups(mesh, successors)
    forget_shardings()
    recover_models(found, is_group_new=True)


def recover_models(
    found: list[Any] | None = None, *, is_group_new: bool = False
) -> None:
    """Reset what a step that failed half-way has left in models.

    Call it on all ranks: DDP's buckets start over, and have to be equal.
    """
    for each in models_and_meshes() if found is None else found:
        # One that cannot be recovered says so when it is used.
        with contextlib.suppress(Exception):
            if isinstance(each, DistributedDataParallel):
                rebuild_reducer(each)
            elif isinstance(each, FSDPModule):
                reset_step(each, drops_gathers=is_group_new)


def list_frozen() -> None:
    """Have the collector list the objects that a cell has frozen, too."""
    if not any(each is _later for each in gc.get_objects()):
        gc.unfreeze()


def models_and_meshes() -> list[Any]:
    """All that are alive and know of process groups, or of their ranks."""
    list_frozen()
    kinds = (
        DistributedDataParallel,
        FSDPModule,
        DeviceMesh,
        Prepared,
        DistributedSampler,
    )
    is_one: dict[type, bool] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in is_one:
            is_one[kind] = issubclass(kind, kinds)
        if is_one[kind]:
            found.append(each)
    return found


def refuse(why: str, *arguments: Any) -> NoReturn:
    """Instead of what would be called with these arguments."""
    raise UnsupportedLoopError(why)


def refuse_iteration(sampler: Any, why: str) -> None:
    """Have `iter(sampler)` raise UnsupportedLoopError, and all else as before: Python
    looks for `__iter__` in the class alone."""
    kind = type(sampler)
    known = {
        "__iter__": lambda self: refuse(why),
        "__module__": kind.__module__,
    }
    sampler.__class__ = type(kind.__name__, (kind,), known)


def holders_of(groups: Mapping[Group, str]) -> list[Any]:
    """The dicts and lists, also those of objects' attributes, that hold `groups`."""
    holders = []
    for each in gc.get_referrers(*groups):
        if isinstance(each, dict | list):
            holders.append(each)
        elif isinstance(inner := getattr(each, "__dict__", None), dict):
            holders.append(inner)
    return holders


def is_aside(mesh: Any, former: FormerGroups) -> bool:
    """Whether its groups may have successors later: they are none of `former`."""
    names = [name for name in group_names_of(mesh) if name not in former.ranks]
    return any(name.startswith(ASIDE.partition("{")[0]) for name in names)


def rename_groups(mesh: Any, successors: Mapping[str, Group]) -> None:
    if names := group_names_of(mesh):
        now = [successors.get(name) for name in names]
        groups = {str(g.group_name): g for g in now if g is not None}
        set_groups_of(mesh, [LOST if g is None else g.group_name for g in now], groups)


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """Let DDP take another step, after one that did not end or on another group."""
    if model.process_group is dist.group.WORLD:
        remake_reducer(model)
