"""What labkit takes of DDP and FSDP2 that is private: the state of a step."""

import contextlib
import operator
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from labkit.compat.gate import Gate
from labkit.compat.torch import call_after_backward
from labkit.compat.torch import is_transformed
from labkit.compat.torch import writable_view

GATE = Gate("torch")
_DDP = "torch.nn.parallel:DistributedDataParallel"
_FSDP = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_FSDP}._fsdp_state:FSDPState"
_GROUP = f"{_FSDP}._fsdp_param_group:FSDPParamGroup"
_PARAM = f"{_FSDP}._fsdp_param:FSDPParam"


# ---- DDP ----


@GATE.needs(f"{_DDP}._static_graph_delay_allreduce_enqueued")
def begin_reduction(ddp: Any) -> None:
    """What DDP's forward does for its reducer before a backward pass.

    Labkit has the user's own model run forward, and DDP reduce its gradients.
    """
    ddp.reducer.prepare_for_forward()
    ddp.reducer._rebuild_buckets()
    if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
        call_after_backward(ddp.reducer._delay_all_reduce)
        ddp._static_graph_delay_allreduce_enqueued = True


@GATE.needs(
    f"{_DDP}._get_ddp_logging_data",
    "torch.distributed:_compute_bucket_assignment_by_size",
)
def buckets_of(ddp: Any, parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of `parameters`, those that require gradients, by DDP's bucket.

    In the order of sending. In the first step DDP has other buckets than later, when it
    knows in which order gradients come.
    """
    ddp.logger.set_runtime_stats_and_log()  # which its forward would do
    told = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    if told:
        return [list(map(int, bucket.split())) for bucket in told.split(",")]
    caps = [sys.maxsize]
    if ddp.find_unused_parameters and not ddp.static_graph:
        first: int = dist._DEFAULT_FIRST_BUCKET_BYTES
        caps = [first, ddp.bucket_bytes_cap]
    found, _ = dist._compute_bucket_assignment_by_size(list(parameters), caps)
    return [list(bucket) for bucket in reversed(found)]


@GATE.needs(f"{_DDP}._sync_buffers")
def broadcast_buffers(ddp: Any) -> None:
    """Give every rank the buffers of rank 0, as DDP's forward does. Collective."""
    ddp._sync_buffers()


@GATE.needs(f"{_DDP}._comm_hooks")
def remake_reducer(ddp: DistributedDataParallel) -> None:
    """Make a reducer for the default group of today, in place. Collective.

    DDP refuses another step after a backward pass that did not end, and its reducer
    knows no other group than it was made with. It is made again when DDP is unpickled,
    on the default group; the same two methods do it here.
    """
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    ddp.__setstate__(ddp.__getstate__())
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)


# ---- FSDP2 ----


@GATE.needs(f"{_FSDP}._fully_shard:FSDPModule._get_fsdp_state", f"{_STATE}._lazy_init")
def init_root(root: FSDPModule) -> None:
    """Make a module the root of its FSDP modules, as its first forward would.

    Or the part of the model that is called first would take itself for the root.
    """
    root._get_fsdp_state()._lazy_init()


@GATE.needs(f"{_STATE}._fsdp_param_group")
def groups_of(module: nn.Module | FSDPModule) -> list[Any]:
    """The groups of parameters that this module gathers, each at once."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    # There can be several since torch 2.12.
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@GATE.needs(
    f"{_FSDP}._fsdp_param_group:record_function", "torch.autograd:_profiler_enabled"
)
def name_for_profilers() -> Callable[[], None]:
    """Have `fully_shard` name what it does only while a profiler is at work; returns
    the way back.

    A name takes 7 µs of CPU time whether one is or not, and each group of parameters
    has eleven in a step: of a small model's on a CPU that is a twentieth.
    """
    module: Any = sys.modules[f"{_FSDP}._fsdp_param_group"]
    nothing, is_at_work = contextlib.nullcontext(), torch.autograd._profiler_enabled

    def named(name: str) -> Any:
        return record_function(name) if is_at_work() else nothing

    module.record_function = named
    # Not what was there: another model that is prepared may have put it there.
    return partial(setattr, module, "record_function", record_function)


@GATE.needs(f"{_GROUP}.use_training_state")
def is_in_forward(group: Any) -> bool:
    """Whether a forward pass that this group is gathered for is under way, or has
    failed."""
    return str(group._training_state.name) == "FORWARD"


@GATE.needs(f"{_STATE}._register_pre_backward_hook")
def choose_hooked(
    module: FSDPModule, choose: Callable[[Any], list[torch.Tensor]]
) -> Callable[[], None]:
    """Have `choose` say which tensors in an FSDP module's output get the hook that
    gathers its parameters for the backward pass; returns the way back."""
    state: Any = module._get_fsdp_state()
    register = state._register_pre_backward_hook

    def register_chosen(output: Any) -> Any:
        if is_transformed():
            return register(output)  # the hooks are functions of their own then
        register(choose(output))
        return output

    state._register_pre_backward_hook = register_chosen
    return partial(delattr, state, "_register_pre_backward_hook")


@GATE.needs(
    f"{_GROUP}._register_post_backward_hook",
    f"{_FSDP}._fsdp_param_group:RegisterPostBackwardFunction",
)
def choose_reducing(
    group: Any,
    change: Callable[[Any, Callable[[Any], Any]], Any],
    note: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None],
) -> Callable[[], None]:
    """Have `change(given, each)` put `each(tensor)` in the place of the tensors in what
    a group's module is given, which reduces its gradients once theirs are there: views
    of them with a hook, to which the module may write. `note` gets the caller's own and
    these. Returns the way back.

    `fully_shard` re-creates dicts and dataclasses by their classes, which not all take,
    and which run again what they do as they are made.
    """
    module: Any = sys.modules[f"{_FSDP}._fsdp_param_group"]

    def register(args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return args, kwargs
        found: dict[int, torch.Tensor] = {}

        def find(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                found[id(tensor)] = tensor
            return tensor

        change((args, kwargs), find)
        if not found:
            return args, kwargs
        hooked = module.RegisterPostBackwardFunction.apply(group, *found.values())
        own = [*found.values()]
        given = [*map(writable_view, hooked, own)]
        note(own, given)
        others = dict(zip(found, given, strict=True))
        return change((args, kwargs), lambda tensor: others.get(id(tensor), tensor))

    group._register_post_backward_hook = register
    return partial(delattr, group, "_register_post_backward_hook")


@GATE.needs(f"{_STATE}._cast_forward_inputs")
def choose_cast(
    module: FSDPModule, change: Callable[[Any, Callable[[Any], Any]], Any]
) -> Callable[[], None]:
    """Have `change`, as above, put tensors in the precision that an FSDP module
    computes in into what it is given; returns the way back."""
    state: Any = module._get_fsdp_state()

    def cast(args: Any, kwargs: Any) -> Any:
        dtype = state._mp_policy.param_dtype
        if dtype is None or not state._mp_policy.cast_forward_inputs:
            return args, kwargs

        def cast_one(tensor: torch.Tensor) -> torch.Tensor:
            is_other = tensor.is_floating_point() and tensor.dtype != dtype
            return tensor.to(dtype) if is_other else tensor

        return change((args, kwargs), cast_one)

    state._cast_forward_inputs = cast
    return partial(delattr, state, "_cast_forward_inputs")


@GATE.needs(f"{_PARAM}.sharded_param")
def memory_of(group: Any) -> list[Any]:
    """What a group's parameters are on this rank."""
    return [part.sharded_param._local_tensor for part in group.fsdp_params]


@GATE.needs(f"{_PARAM}.reset_sharded_param")
def take_moved(group: Any, known: list[Any]) -> None:
    """Have a group gather what its parameters are now, where these have been given
    other memory than `known`, as by `model.head.double()` and back: torch sees to it
    where a module that it shards has moved, and not a part of one."""
    if any(map(operator.is_not, known, memory_of(group))):
        with torch.no_grad():
            for part in group.fsdp_params:
                part.reset_sharded_param()
        known[:] = memory_of(group)


@GATE.needs(f"{_STATE}._register_root_post_backward_final_callback")
def reduce_at_end(root: FSDPModule) -> None:
    """Within a backward pass: reduce at its end, whichever hooks are called."""
    root._get_fsdp_state()._register_root_post_backward_final_callback()


@GATE.needs(f"{_GROUP}.reduce_grads", f"{_GROUP}.all_reduce_grads")
def set_reduction(groups: Sequence[Any], *, is_on: bool) -> None:
    """Whether backward passes reduce the gradients of these groups: what
    `FSDPModule.set_requires_gradient_sync` does, which searches the model for them."""
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = is_on


@GATE.needs(f"{_PARAM}._unsharded_param")
def whole_of(part: Any) -> Any:
    """The whole parameter, where it has been gathered before; None elsewhere."""
    return getattr(part, "_unsharded_param", None)


def whole_of_each(parts: Iterable[Any]) -> list[Any]:
    """The same of several: each step asks it of all of a model's."""
    return [getattr(part, "_unsharded_param", None) for part in parts]


@GATE.needs(f"{_GROUP}.post_forward")
def shard_of(part: Any) -> Any:
    """The DTensor that the model has in a parameter's place between passes."""
    return part.sharded_param


@GATE.needs(
    f"{_FSDP}._fsdp_param:ParamModuleInfo",
    f"{_PARAM}._sharded_post_forward_param",
)
def is_in_place(part: Any) -> bool:
    """Whether the model has in a parameter's place what `fully_shard` has put there."""
    place = part._module_info
    held = place.module._parameters.get(place.param_name)
    return held is not None and (
        held is part.sharded_param
        or held is getattr(part, "_unsharded_param", None)  # where it is gathered
        # Between two passes it may be a part that is of fewer ranks.
        or held is getattr(part, "_sharded_post_forward_param", None)
    )


@contextlib.contextmanager
@GATE.needs(
    f"{_FSDP}._fully_shard:FSDPModule._orig_cls_mro_index",
    "torch.nn.modules.module:_WrappedHook",
)
def as_before_sharding(module: nn.Module) -> Iterator[None]:
    """Take from every module in it what `fully_shard` and labkit have added, for as
    long as it is copied."""
    kept = [(each, type(each), dict(vars(each))) for each in module.modules()]
    try:
        for each, kind, before in kept:
            if isinstance(each, FSDPModule):
                each.__class__ = kind.__mro__[each._orig_cls_mro_index]
            own = vars(each)
            for name, value in before.items():
                if name.startswith(_ADDED):
                    del own[name]
                elif name.endswith("_hooks"):
                    own[name] = type(value)(
                        (key, hook)
                        for key, hook in value.items()
                        if not _is_added(hook)
                    )
        yield
    finally:
        for each, kind, before in kept:
            each.__class__ = kind
            vars(each).clear()
            vars(each).update(before)


_ADDED = (
    "__composable_api_state_key",
    "__deepcopy__",
    "__prepare_scriptable__",
    "_fsdp_use_orig_params",
    "_is_fsdp_managed_module",
)
"""Attributes of modules, or how their names begin."""


def _is_added(hook: Any) -> bool:
    """Whether a hook of a module is of `fully_shard` or labkit."""
    if isinstance(hook, partial):
        return _is_added(hook.func)
    if type(hook).__name__ == "_WrappedHook":
        return _is_added(hook.hook)
    whose = str(getattr(hook, "__module__", ""))
    return whose.startswith((_FSDP, "labkit."))


def replaced_of(group: Any) -> Any:
    """The first parameter of a group that is not in its place, or None."""
    for part in group.fsdp_params:
        if not is_in_place(part):
            return part
    return None


@GATE.needs(f"{_PARAM}._orig_size")
def whole_size(part: Any) -> int:
    """The elements of the whole parameter."""
    size: torch.Size = part._orig_size
    return size.numel()


@GATE.needs(f"{_PARAM}.unsharded_accumulated_grad")
def drop_whole_gradients(parts: Sequence[Any]) -> None:
    """Forget the gradients of microbatches, which `fully_shard` has not reduced yet."""
    for part, whole in zip(parts, whole_of_each(parts), strict=True):
        part.unsharded_accumulated_grad = None
        if whole is not None:
            whole.grad = None


@GATE.needs(f"{_GROUP}._all_gather_result", f"{_STATE}._is_root")
def reset_step(module: FSDPModule, *, drops_gathers: bool) -> None:
    """Take back what a step that failed half-way has left; `module` need not be a root.

    Source: `FSDPModule.reset_iter_state`, which waits for what is under way: with
    `drops_gathers` it has gone with its group.
    """
    state: Any = module._get_fsdp_state()
    if drops_gathers:
        for group in groups_of(module):
            group._all_gather_result = None
    if not state._is_root:
        return
    if hasattr(module, "reset_iter_state"):  # since torch 2.12
        module.reset_iter_state()
    else:
        _reset_step_by_hand(state)


def _reset_step_by_hand(root: Any) -> None:
    """`FSDPModule.reset_iter_state` for a torch that has none."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        if (group := state._fsdp_param_group) is None:
            continue
        group._all_gather_result = group._post_reduce_event = None
        group._all_reduce_state = group._reshard_after_forward_event = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
