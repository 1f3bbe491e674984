"""What labkit takes of torch.distributed that is private: groups, meshes, rpc."""

import contextlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from labkit.compat.gate import Gate

GATE = Gate("torch")
Group = dist.ProcessGroup

with GATE.imports():
    from torch.distributed.rendezvous import _rendezvous_handlers

_C10D = "torch.distributed.distributed_c10d"
_RPC = "torch.distributed.rpc"
_c10d: Any = torch._C._distributed_c10d


OPERATORS = ("c10d", "_c10d_functional")
"""The namespaces of the operators of collectives."""


# ---- groups ----


@GATE.needs(f"{_C10D}:_World.pg_names")
def names_of_groups() -> dict[Group, str]:
    """All groups of this process, by which their names are known: torch lists none."""
    return {group: str(name) for group, name in list(c10d._world.pg_names.items())}


@GATE.needs(f"{_C10D}:_World.pg_group_ranks")
def ranks_of(group: Group) -> list[int]:
    """The ranks of a group; none where it has gone, for which the public function
    raises KeyError."""
    return sorted(c10d._world.pg_group_ranks.get(group, ()))


@GATE.needs(f"{_C10D}:_World.pg_map")
def is_alive(group: Any) -> bool:
    """Whether torch knows this group, and has not destroyed it."""
    return group in c10d._world.pg_map


@GATE.needs(f"{_C10D}:_World.group_count")
def num_groups_made() -> int:
    """The count that groups are named by, which has to be equal on all ranks."""
    count: int = c10d._world.group_count
    return count


@GATE.needs(f"{_C10D}:_World.group_count")
def reset_group_count() -> None:
    """Name groups from 0 again.

    An init that was interrupted on one rank alone leaves the counts unequal: the ranks
    would wait for each other under different names.
    """
    c10d._world.group_count = 0


@GATE.needs(f"{_C10D}:_resolve_process_group")
def group_named(name: str) -> Group:
    """The group of a name, which is what functional collectives have of it."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


@GATE.needs(f"{_C10D}:_update_default_pg")
def set_default_group(group: Group | None) -> None:
    """Make another group the default one."""
    c10d._update_default_pg(group)


@GATE.needs(f"{_C10D}:_abort_process_group")
def forget_aborted_groups() -> None:
    """Forget all groups, each of which was aborted: `destroy_process_group` waits for
    kernels that may never end. To abort a group again does nothing."""
    c10d._abort_process_group()


@GATE.needs(f"{_C10D}:_get_process_group_store")
def store_of(group: Group) -> Any:
    """The store that a group's ranks met at."""
    return c10d._get_process_group_store(group)


@GATE.needs("torch.distributed:ProcessGroup._get_sequence_number_for_group")
def num_started(group: Group) -> int:
    """How many collectives this rank has started in a group; RuntimeError where it has
    none yet, or is being destroyed."""
    counted: Any = group
    found: int = counted._get_sequence_number_for_group()
    return found


def rendezvous_of(scheme: str) -> Callable[..., Any]:
    """What a URL of this scheme leads to."""
    return _rendezvous_handlers[scheme]


def replace_rendezvous(scheme: str, handler: Callable[..., Any]) -> None:
    """Have `env://`, say, lead elsewhere: `register_rendezvous_handler` takes new
    schemes only."""
    _rendezvous_handlers[scheme] = handler


@GATE.needs("torch._C._distributed_c10d:_dump_fr_trace_json")
def flight_records(*flags: bool) -> list[str]:
    """Torch's records of collectives, each as JSON; `flags` are whether to have single
    collectives, and only active ones. Gloo's, and NCCL's, which CPU builds lack."""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [getattr(_c10d, n)(*flags).decode() for n in names if hasattr(_c10d, n)]


@GATE.needs("torch.distributed:ProcessGroup._get_backend")
def timeout_of(group: Any) -> timedelta:
    """How long a group's collectives wait for others. A new group has torch's default,
    30 min over gloo and 10 over NCCL, and not the one of the default group."""
    kind = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
    return timeout


def adopt_timeout(group: Any, default: Any) -> None:
    """Have a group that torch has made by itself wait as long as the default group."""
    # Old versions, as 2.9, cannot do so under TORCH_DISTRIBUTED_DEBUG=DETAIL.
    with contextlib.suppress(RuntimeError):
        group.set_timeout(timeout_of(default))


@GATE.needs(f"{_C10D}:_get_default_store")
def default_store() -> Any:
    """The store that the ranks of the default group met at."""
    return c10d._get_default_store()


@GATE.needs("torch.distributed:ProcessGroup._get_backend")
def number_ranks(group: Any, device: torch.device) -> None:
    """Have NCCL's default group know the numbers of its ranks. Of none but the first
    of a process it does by itself, and crashes where a mesh splits another.

    Source: `ProcessGroupNCCL::groupRanks` and `split` (torch 2.9 to 2.13).
    """
    options = group._get_backend(device).options
    options.global_ranks_in_group = list(range(group.size()))


@GATE.needs(f"{_C10D}:_coalescing_manager")
def is_batch_cut(error: BaseException) -> bool:
    """Whether an error has ended a batch of messages, or has come before its end: torch
    then counts a batch too many, and forms no other group of NCCL in this process
    ("ncclGroupEnd: not in a group call").

    Source: `ProcessGroupNCCL::groupEnd`, which does not count one that has failed.
    """
    batch = inspect.unwrap(c10d.batch_isend_irecv).__code__
    manager = inspect.unwrap(c10d._coalescing_manager).__code__
    return any(
        (frame.f_code is batch and "cm" in frame.f_locals)
        or (frame.f_code is manager and frame.f_locals.get("device") is not None)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


FUNCTIONAL = "_c10d_functional"
"""The namespace of collectives that return their result."""


def wait_for(tensor: torch.Tensor) -> None:
    """Wait for the result of a functional collective."""
    torch.ops._c10d_functional.wait_tensor(tensor)


def as_plain_output(tensor: torch.Tensor) -> torch.Tensor:
    """What a DTensor's `to_local()` gave as a tensor like others, without a copy.

    It is a view of a DTensor, which autograd does not let a loop change in place, and
    may be on its way still, in a subclass that waits when it is used.
    """
    if torch.is_inference_mode_enabled():
        return tensor.clone()
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)


# ---- meshes and DTensor ----


@GATE.needs("torch.distributed.device_mesh:DeviceMesh._dim_group_names")
def group_names_of(mesh: Any) -> list[str]:
    """The names by which a DeviceMesh finds its groups; none before it has any."""
    return [str(name) for name in getattr(mesh, "_dim_group_names", [])]


@GATE.needs("torch.distributed.device_mesh:DeviceMesh._dim_group_names")
def set_groups_of(mesh: Any, names: list[str], groups: Mapping[str, Group]) -> None:
    """Have a DeviceMesh find other groups, by their names.

    A new mesh can be made of groups, but others hold references to this one.
    """
    mesh._dim_group_names = names
    if hasattr(mesh, "_pg_registry"):  # since torch 2.11; before, all are looked up
        registry = mesh._pg_registry
        # A group that is kept here keeps its connections open, and its store.
        for name in [name for name, group in registry.items() if not is_alive(group)]:
            del registry[name]
        registry.update(groups)


@GATE.needs("torch.distributed.device_mesh:DeviceMesh._flatten")
def flattened(mesh: Any) -> Any:
    """The ranks of a DeviceMesh along a single axis. Collective.

    Public API has no group of several axes; torchtitan takes the same.
    """
    return mesh if mesh.ndim == 1 else mesh._flatten()


def forget_shardings() -> None:
    """Forget DTensor's results with meshes of before: it finds them for any mesh that
    is equal to one."""
    # It takes 0.8 s to load: not where only the names of this module are wanted.
    from torch.distributed.tensor import debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
        return
    # Old versions, as 2.9, have nothing but the cache itself.
    operators: Any = DTensor._op_dispatcher
    operators.sharding_propagator.propagate_op_sharding.cache.cache_clear()


MADE_WHOLE = ("Redistribute", "_ToTorchTensor")
"""The operations of `full_tensor()` in a graph."""


@GATE.needs("torch.distributed.tensor:DTensor._local_tensor")
def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is.

    `to_local()` is an operator: this is called while others are in the middle.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_in_parts(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor of a mesh that divides the data, too."""
    if not isinstance(tensor, DTensor):
        return False
    return tensor.device_mesh.mesh_dim_names != ("tp",)


def quiet_redistribution() -> None:
    """Have torch not warn that shards along two axes are gathered one after the other:
    nothing else can be done of shards of split layers."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.setLevel(logging.ERROR)


NLL_BACKWARD = (
    torch.ops.aten.nll_loss_backward.default,
    torch.ops.aten.nll_loss2d_backward.default,
)
LOG_SOFTMAX_BACKWARD = torch.ops.aten._log_softmax_backward_data.default
"""Operators that `loss_parallel` computes of DTensors by itself."""


@GATE.needs("torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers")
def handlers_of_dtensor() -> dict[Any, Callable[..., Any]]:
    """What computes an operator of DTensors by itself, as within `loss_parallel`."""
    found: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return found


# ---- torch.distributed.rpc ----


@GATE.needs(f"{_RPC}.api:_is_current_rpc_agent_set")
def has_rpc_agent() -> bool:
    """Whether `init_rpc` was called, and `shutdown` was not."""
    rpc: Any = sys.modules.get(_RPC)
    return rpc is not None and bool(rpc.api._is_current_rpc_agent_set())


@GATE.needs(
    f"{_RPC}:_init_counter",
    f"{_RPC}.api:_all_gather_sequence_id",
    f"{_RPC}.api:_all_gather_sequence_id_to_states",
)
def reset_rpc_counts() -> None:
    """Reset the counters that have to be equal on all ranks; the others do so as well.

    A rank that failed, or was restarted, has counted fewer calls than others.
    """
    rpc: Any = sys.modules.get(_RPC)
    if rpc is not None:
        rpc._init_counter = 0
        rpc.api._all_gather_sequence_id.clear()
        rpc.api._all_gather_sequence_id_to_states.clear()
