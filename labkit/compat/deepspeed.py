"""What labkit takes of DeepSpeed's ZeRO that is private.

Beside these, labkit reads attributes that DeepSpeed has for itself, if without an
underscore: they are in `ATTRIBUTES`.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import sys
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from labkit.compat.gate import Gate

GATE = Gate("deepspeed")
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_STAGE_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3_MODULE = "deepspeed.runtime.zero.stage3"
_STAGE_3 = f"{_STAGE_3_MODULE}:DeepSpeedZeroOptimizer_Stage3"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_INIT = "deepspeed.runtime.zero.partition_parameters:Init"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
_RELEASES = "_PartitionedParameterCoordinator__params_to_release"
_BASE = "deepspeed.runtime.base_optimizer"
_UTILS = "deepspeed.runtime.zero.utils"
_BACKEND = "deepspeed.comm.torch:TorchBackend"
_COMPARES = ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0")

ATTRIBUTES = (
    f"{_STAGE_2}.all_grad_tensors",
    f"{_STAGE_2}.averaged_gradients",
    f"{_STAGE_2}.ipg_buckets",
    f"{_STAGE_2}.reduce_ready_partitions_and_remove_grads",
    f"{_STAGE_2}.set_gradient_accumulation_boundary",
    f"{_STAGE_2}.single_partition_of_fp32_groups",
    f"{_STAGE_2}.update_lp_params",
    f"{_STAGE_3}.fp16_groups",
    f"{_STAGE_3}.fp32_partitioned_groups_flat",
    f"{_STAGE_3}.grad_partitions_flat_buffer",
    f"{_STAGE_3}.ipg_buckets",
    f"{_STAGE_3}.persistent_parameters",
    f"{_STAGE_3}.empty_partition_cache",
    f"{_STAGE_3}.invalidate_secondary_tensor",
    f"{_STAGE_3}.reduce_ready_partitions_and_remove_grads",
    f"{_INIT}.param_id",
    f"{_OFFLOAD}:FWD_MODULE_STACK",
    f"{_UTILS}:apply_to_tensors_only",
    *(f"{_UTILS}:{name}" for name in _COMPARES),
    "deepspeed.comm.comm:cdb",
    "deepspeed.ops:_probe_compatible_ops",  # of what a look at it would compile for 4 s
)

OF_ENGINE = ("_external_params", "post_bwd_fn", "pre_bwd_fn")
"""What a module of stage 3 has of its engine. In a copy of it another engine would take
that for its own."""
_OF_A_PASS = {"applied_pre_backward_ref_cnt", "_external_params", "_parameters"}


def is_of_deepspeed(attribute: Any) -> bool:
    """Whether stage 3 has this attribute of a module for itself, as what its passes
    count."""
    return isinstance(attribute, str) and (
        attribute.startswith("ds_") or attribute in _OF_A_PASS
    )


@GATE.needs(f"{_COORDINATOR}:PartitionedParameterCoordinator.{_RELEASES}")
def forget_passes() -> None:
    """Drop what DeepSpeed remembers of the passes of every model of stage 3, and the
    models with it: in a cache of a method, which it has around another function."""
    kind: Any = sys.modules[_COORDINATOR].PartitionedParameterCoordinator
    inspect.getclosurevars(getattr(kind, _RELEASES)).nonlocals["func"].cache_clear()


MAX_DEPTH = 3
"""Of objects within objects that stage 3 looks into."""


def load() -> Any:
    """Import DeepSpeed without torch's inductor.

    Its optimizer Muon is decorated with `torch.compile`, and every ZeRO engine imports
    it: 1.3 s in the first cell, and a third of all that a rank has loaded.
    """
    compiler: Any = torch.compile
    torch.compile = functools.partial(compile_late, compiler)
    try:
        deepspeed = importlib.import_module("deepspeed")
        with contextlib.suppress(ImportError):  # as DeepSpeed does
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = compiler
    return deepspeed


def compile_late(
    compiler: Callable[..., Any],
    function: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """A function that `compiler` compiles when it is first called."""
    if function is None:
        return functools.partial(compile_late, compiler, **options)
    plain = function

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compiler(plain, **options)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of another that is compiled
            return plain(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return call


@GATE.needs("deepspeed.utils.numa:get_numa_cores")
def look_at_numa_once() -> None:
    """Have the machine's NUMA nodes listed once: on the CPU, stage 3 starts `numactl`
    each time that it reduces gradients."""
    numa: Any = importlib.import_module("deepspeed.utils.numa")
    if not hasattr(numa.get_numa_cores, "cache_info"):
        numa.get_numa_cores = functools.cache(numa.get_numa_cores)


@GATE.needs(
    f"{_BACKEND}.get_all_gather_function", f"{_BACKEND}.get_reduce_scatter_function"
)
def use_new_names() -> None:
    """Have DeepSpeed call collectives by the names that torch has for them today: those
    of before warn, which is an error to a loop that wants warnings to be errors."""
    backend: Any = importlib.import_module("deepspeed.comm.torch").TorchBackend
    for name in ("all_gather", "reduce_scatter"):
        if (new := getattr(torch.distributed, f"{name}_single", None)) is not None:
            # Not a partial, which is a method from Python 3.14 on, and warns in 3.13.
            setattr(backend, f"get_{name}_function", staticmethod(lambda new=new: new))


@GATE.needs(f"{_OFFLOAD}:ZeROOrderedDict.__getitem__")
def gather_none_read(when: Callable[[], bool]) -> None:
    """Have stage 3 gather no parameter that is read in a forward pass while `when()`,
    as `torch.func.functional_call` reads those that it puts others in the place of."""
    kind: Any = importlib.import_module(_OFFLOAD).ZeROOrderedDict
    plain = kind.__getitem__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def read(self: Any, name: str) -> Any:
        if self._in_forward and when():
            return dict.__getitem__(self, name)
        return plain(self, name)

    kind.__getitem__ = read


@GATE.needs(f"{_OFFLOAD}:apply_to_tensors_only", f"{_UTILS}:apply_to_tensors_only")
def look_into_objects(
    has_tensors: Callable[[Any], bool],
    map_attributes: Callable[[Callable[[Any], Any], Any], None],
) -> None:
    """Have stage 3 find the tensors of any object that a module takes or returns, as
    it does those of a dict: when their gradients come, it gathers and frees the
    module's parameters. And have a list stay the one that the model's forward has, to
    which a module may append. What the loop itself gives the model is left as it is."""
    utils: Any = importlib.import_module(_UTILS)
    offload: Any = importlib.import_module(_OFFLOAD)
    plain = utils.apply_to_tensors_only
    if hasattr(plain, "__wrapped__"):
        return
    under_way: list[Any] = []

    @functools.wraps(plain)
    def apply(function: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if function is unchanged:
            return value
        if type(value) is torch.Tensor:  # mostly; a parameter has another type
            return function(value)
        kind = getattr(getattr(function, "__self__", None), "__name__", "")
        of_inputs = kind.startswith("PostBackward")
        is_of_loop = of_inputs and len(offload.FWD_MODULE_STACK) < 2
        if isinstance(value, list) and not is_of_loop:
            value[:] = [apply(function, each) for each in value]
            return value
        is_known = isinstance(value, torch.Tensor | nn.Module | tuple | list | dict)
        if is_known or is_of_loop or not has_tensors(value):
            return plain(function, value, *args, **kwargs)
        is_circle = any(each is value for each in under_way)
        if not is_circle and len(under_way) < MAX_DEPTH:
            under_way.append(value)
            try:
                map_attributes(functools.partial(apply, function), value)
            finally:
                under_way.pop()
        return value

    utils.apply_to_tensors_only = offload.apply_to_tensors_only = apply


@GATE.needs(*ATTRIBUTES)
def look_into() -> None:
    """Measure the memory of ZeRO's parts, and reduce when labkit says so."""


@GATE.needs(f"{_INIT}._convert_to_zero_parameters")
def partition(partitioner: Any, parameter: nn.Parameter) -> None:
    """Partition one parameter for stage 3: `zero.Init` does so as modules are made."""
    partitioner._convert_to_zero_parameters([parameter])


@GATE.needs(
    f"{_STAGE_3}._post_step", f"{_STAGE_3_MODULE}:count_used_parameters_in_backward"
)
def ask_within(wrap: Callable[..., Any], zero: Any) -> None:
    """Have stage 3 itself ask parameters within `wrap`, as it gathers them after a step
    and counts those that a backward pass reaches."""
    zero._post_step = wrap(zero._post_step)
    module: Any = importlib.import_module(_STAGE_3_MODULE)
    if not hasattr(module.count_used_parameters_in_backward, "__wrapped__"):
        module.count_used_parameters_in_backward = wrap(
            module.count_used_parameters_in_backward
        )


@GATE.needs(f"{_STAGE_3}._get_fp32_opt_state_partition")
def part_in_fp32(zero: Any, parameter: Any) -> torch.Tensor:
    """What stage 3 steps a parameter from on this rank, also one that the loop has
    frozen since; to be written to."""
    part: torch.Tensor
    part, _ = zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=True)
    return part


@GATE.needs(f"{_STAGE_2}._link_all_hp_params")
def keep_optimizer(zero: Any, optimizer: torch.optim.Optimizer) -> None:
    """Have the user's own optimizer update the partitions.

    In place of an Adagrad, which makes its states at once, DeepSpeed puts another of
    one group with the first settings, which the loop cannot change.
    """
    if zero.optimizer is not optimizer:
        zero.optimizer = optimizer
        if hasattr(zero, "_link_all_hp_params"):  # it went by the other's groups
            zero._link_all_hp_params()


@GATE.needs(
    f"{_STAGE_2}._hp_optimizer_states_linked",
    f"{_STAGE_2}._lazy_init_hp_params_optimizer_state",
)
def link_states(zero: Any) -> None:
    """Link parameters with their optimizer's states now, in stages 1 and 2.

    DeepSpeed does it in the first step, when but the first group has states.
    """
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


@GATE.needs(
    f"{_STAGE_3}._partition_all_parameters",
    f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters",
)
def update_working_parameters(zero: Any) -> None:
    """Let the model compute with what the fp32 partitions hold. Collective."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
        return
    # What stage 3 does at the end of a step.
    zero._partition_all_parameters()
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.invalidate_secondary_tensor()  # or the next pass would gather that one
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


@GATE.needs(f"{_ENGINE}._is_gradient_accumulation_boundary")
def set_boundary(engine: Any, zero: Any, *, is_on: bool) -> None:
    """Whether a step is complete: what `set_gradient_accumulation_boundary` does, as a
    module, which sets attributes ten times as slowly."""
    vars(engine)["_is_gradient_accumulation_boundary"] = is_on
    zero.set_gradient_accumulation_boundary(is_on)


@GATE.needs(
    f"{_ENGINE}._manual_backward_expected",
    f"{_ENGINE}._backward_prologue",
    f"{_BASE}:ZeROOptimizer.clear_backward_seen_flag",
)
def prepare_backward(engine: Any, zero: Any) -> None:
    """What the engine's `forward` does for a backward pass, which need not be called
    once for every one."""
    zero.clear_backward_seen_flag()
    vars(engine)["_manual_backward_expected"] = True  # it is a module: 10 times as fast
    engine._backward_prologue()


@GATE.needs(
    f"{_BASE}:ZeROOptimizer._backward_hook_state",
    f"{_BASE}:BackwardHookStateManager._grad_acc_post_hooks",
)
def call_before_reduction(zero: Any, function: Callable[..., None]) -> None:
    """Have a function called when a pass has ended, before what DeepSpeed does then."""
    zero._backward_hook_state._grad_acc_post_hooks.insert(0, function)


@GATE.needs(f"{_BASE}:ZeROOptimizer._backward_hook_state")
def forget_backward(zero: Any) -> None:
    """Let another step begin after a backward pass that did not end."""
    state = zero._backward_hook_state
    state.backward_active_depth = state.remaining_grad_acc_hooks = 0
    state.reset_for_new_step()


@GATE.needs(
    f"{_STAGE_2}.micro_step_id",
    f"{_STAGE_2}._offload_accumulated_param_ids",
)
def forget_offloaded(zero: Any) -> None:
    """Have the next pass of stages 1 and 2 begin a sum of gradients on the CPU, where
    the optimizer is offloaded: it would add to what was discarded."""
    zero.micro_step_id = -1
    if zero.cpu_offload:
        zero._offload_accumulated_param_ids = set()


@GATE.needs(
    f"{_STAGE_2}.async_accumulate_grad_in_cpu_via_gpu",
    f"{_STAGE_2}.accumulated_grads_in_cpu",
    f"{_STAGE_2}.micro_step_id",
    f"{_STAGE_2}._offload_accumulated_param_ids",
)
def begin_sums_on_cpu(zero: Any) -> None:
    """Have each sum of gradients on the CPU begin with 0 in a step: from the second
    pass of it on, DeepSpeed adds to what is there of a parameter, which is the sum of
    the step before where the first pass has not reached it."""
    add = zero.async_accumulate_grad_in_cpu_via_gpu

    def begin_or_add(parameter: Any) -> None:
        number = zero.get_param_id(parameter)
        former = zero.accumulated_grads_in_cpu.get(number)
        is_first = number not in zero._offload_accumulated_param_ids
        if is_first and zero.micro_step_id > 0 and former is not None:
            former.zero_()
        add(parameter)

    if zero.cpu_offload:
        zero.async_accumulate_grad_in_cpu_via_gpu = begin_or_add


@GATE.needs(
    f"{_STAGE_2}.params_in_partition",
    f"{_STAGE_2}.grad_position",
    f"{_STAGE_2}.norm_for_param_grads",
    f"{_STAGE_2}.single_partition_of_fp32_groups",
)
def drop_offloaded(zero: Any, used: Container[int]) -> None:
    """Have a step that is offloaded take a gradient of 0 for a parameter whose id is
    not in `used`: DeepSpeed takes that of the last step that had one."""
    for number, master in enumerate(zero.single_partition_of_fp32_groups):
        for parameter in zero.params_in_partition[number]:
            if id(parameter) not in used and master.grad is not None:
                place = zero.get_param_id(parameter)
                _, _, start, length = zero.grad_position[place]
                master.grad.view(-1).narrow(0, start, length).zero_()
                zero.norm_for_param_grads.pop(place, None)


def live_engines() -> list[Any]:
    """The engines of this process, whoever has made them."""
    module: Any = sys.modules.get("deepspeed.runtime.engine")
    if module is None:
        return []
    kind = module.DeepSpeedEngine
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


@GATE.needs(f"{_STAGE_2}._release_ipg_buffers")
def release_buckets(zero: Any) -> None:
    """Free the buckets that stages 1 and 2 reduce gradients in."""
    zero._release_ipg_buffers()


_compare: dict[str, Callable[..., Any]] = {}


def compare_within(context: contextlib.ContextDecorator) -> None:
    """Have stage 3 compare what it does with other ranks, as it does now and then, in
    `context`."""
    utils = importlib.import_module(_UTILS)
    for name in _COMPARES:
        setattr(utils, name, context(_compare.setdefault(name, getattr(utils, name))))


@GATE.needs(f"{_COORDINATOR}:PartitionedParameterCoordinator._invalidate_trace")
def drop_trace(coordinator: Any) -> None:
    """Have stage 3 record again in which order a pass uses parameters, or it would
    take half of a pass for a whole one."""
    coordinator._invalidate_trace()


class _External(dict[int, Any]):
    """What `_external_params` of a module is: the parameters of others that it uses."""

    def __init__(self, found: Mapping[int, Any], on_new: Callable[[], None]) -> None:
        super().__init__(found)
        self._on_new = on_new
        self._known = {*found}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __setitem__(self, key: int, parameter: Any) -> None:
        super().__setitem__(key, parameter)
        if key not in self._known:  # most are taken out and put in again in each pass
            self._known.add(key)
            self._on_new()


@GATE.needs("deepspeed.runtime.zero.partition_parameters:_init_external_params")
def follow_external(modules: Iterable[Any], coordinator: Any) -> None:
    """Have stage 3 record again in which order a pass uses parameters, once a module
    uses one of another's for the first time, as layers of a transformer do in
    evaluation alone: it would miss it in the order that it has."""

    def on_new() -> None:
        if coordinator.is_complete_trace():
            drop_trace(coordinator)

    for module in modules:
        module._external_params = _External(module._external_params, on_new)


@GATE.needs("deepspeed.utils.groups:_WORLD_GROUP")
def forget_world_group() -> None:
    """Have DeepSpeed make its copy of the default group again, when it needs it next,
    and the groups of `second_copies`.

    It keeps the copy from one `initialize` to the next. Making one is collective: call
    this on all ranks, whatever each of them has.
    """
    _sharing.clear()
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        groups._WORLD_GROUP = None
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


_sharing: dict[int, Any] = {}
"""By their number, the group of ranks which share a second copy of the parameters."""


@GATE.needs("deepspeed.utils.groups:_ZERO_PARAM_INTRA_PARALLEL_GROUP")
@contextlib.contextmanager
def second_copies(num_ranks: int) -> Iterator[Any]:
    """Have DeepSpeed share second copies of parameters (hpZeRO) among `num_ranks`, in
    the group that is given, or one that it makes where this is None.

    It keeps one group for a process's life, and refuses to make another.
    """
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    before = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP  # which a cell has made
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = _sharing.get(num_ranks)
    try:
        yield groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
        _sharing[num_ranks] = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    finally:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = before


@GATE.needs(f"{_OFFLOAD}:DeepSpeedZeRoOffload._register_deepspeed_module")
def module_count() -> list[int]:
    """How many modules stage 3 has numbered in this process: the only element.

    It is the mutable default of an argument.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    register: Any = DeepSpeedZeRoOffload._register_deepspeed_module
    defaults: Sequence[list[int]] = register.__defaults__
    [count] = defaults
    return count


def unchanged(value: Any) -> Any:
    """What is there to be applied to tensors where nothing is to become of them."""
    return value


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`function` of each tensor, as DeepSpeed looks for them in what a module is given
    and returns: in tuples, in lists, and in dicts, which are changed."""
    if isinstance(value, torch.Tensor) and not hasattr(value, "ds_id"):
        return function(value)
    if type(value) is tuple:
        return tuple([map_tensors(function, each) for each in value])
    from deepspeed.runtime.zero.utils import apply_to_tensors_only

    return apply_to_tensors_only(function, value)
