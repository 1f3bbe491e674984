"""What labkit takes of torch that is private: tensors, autograd, modules, loaders."""

import contextlib
import functools
import importlib
import multiprocessing.process
import multiprocessing.util
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from labkit.compat.gate import Gate

GATE = Gate("torch")

OF_MODULES = ("_modules", "_parameters", "_buffers")
"""Where a module has what is assigned to it."""

Overflows = dict[torch.device, torch.Tensor]
"""By device: 1.0 if a gradient there is infinite or NaN, otherwise 0.0."""
Unscale = Callable[[Any], Overflows]
"""Divides the gradients of an optimizer by what the loss was scaled by."""

with GATE.imports():
    # torch has pytrees, fake tensors and dispatch modes in private modules only. As
    # extensions use them they are stable in fact: its documentation names them.
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass

    # Unlike `no_dispatch` of torch.utils._mode_utils it costs no generator.
    from torch._C import _DisableTorchDispatch as no_dispatch

    # For each node of the graph, within a backward pass: whether it will be run.
    from torch._C import _will_engine_execute_node as will_execute
    from torch._C._functorch import get_unwrapped as get_unwrapped
    from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import is_fake as is_fake
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.modules.dropout import _DropoutNd as DropoutBase
    from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm
    from torch.overrides import TorchFunctionMode
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
    from torch.utils._python_dispatch import (
        _get_current_dispatch_mode as current_dispatch_mode,
    )
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils._python_dispatch import (
        is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
    )
    from torch.utils._pytree import register_pytree_node as register_pytree_node
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten
    from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = [
    "BatchNormBase",
    "DisableTorchFunctionSubclass",
    "DropoutBase",
    "FakeTensorMode",
    "NormBase",
    "SpectralNorm",
    "TorchDispatchMode",
    "current_dispatch_mode",
    "get_unwrapped",
    "is_fake",
    "is_functorch_wrapped",
    "is_traceable_wrapper_subclass",
    "no_dispatch",
    "register_pytree_node",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "will_execute",
    "without_modes",
]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_LOADER = "torch.utils.data.dataloader:_BaseDataLoaderIter"


# ---- what is set for a thread ----


class ThreadSettings:
    """Gradients, autocast, modes and the like of this thread, as they are now.

    An interrupt can come in the `__exit__` that would end one of them.
    """

    def __init__(self) -> None:
        self._has_grad = torch.is_grad_enabled()
        self._has_cache = torch.is_autocast_cache_enabled()
        self._has_threads = torch.autograd.is_multithreading_enabled()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        }
        self._nesting = _autocast_nesting()
        self._num_modes = [len(stack()) for stack, _ in _MODES]
        self._hooks = [frozenset(each) for each in global_hooks()]

    def restore(self) -> None:
        """Set what has been left, as it was."""
        torch.set_grad_enabled(self._has_grad)
        torch.set_autocast_cache_enabled(self._has_cache)
        torch.autograd.set_multithreading_enabled(self._has_threads)
        for kind, (is_enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if not self._nesting:
            torch.clear_autocast_cache()  # of weights that have changed since
        for (stack, kind), before in zip(_MODES, self._num_modes, strict=True):
            while len(modes := stack()) > before:
                # Not its own, which may do more: print what it has counted.
                kind.__exit__(modes[-1], None, None, None)
        for hooks, known in zip(global_hooks(), self._hooks, strict=True):
            for key in hooks.keys() - known:
                _leave(hooks.get(key))


def _leave(hook: Any) -> None:
    """End the context whose method the hook is, as FlopCounterMode's ModuleTracker."""
    owner = getattr(hook, "__self__", None)
    if isinstance(owner, contextlib.AbstractContextManager):
        with contextlib.suppress(Exception):  # it may have ended in part
            owner.__exit__(None, None, None)


def _autocast_nesting() -> int:
    nesting: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting - 1


_MODES: tuple[tuple[Callable[[], list[Any]], Any], ...] = (
    (_get_current_dispatch_mode_stack, TorchDispatchMode),
    (_get_current_function_mode_stack, TorchFunctionMode),
)


_WITH_HOOKS = ("torch.nn.modules.module", "torch.optim.optimizer")


@GATE.needs(
    "torch.nn.modules.module:_global_forward_hooks",
    "torch.optim.optimizer:_global_optimizer_pre_hooks",
)
@functools.cache
def global_hooks() -> list[dict[Any, Any]]:
    """The dicts of hooks that all modules, or all optimizers, call."""
    owners = map(importlib.import_module, _WITH_HOOKS)
    return [
        value
        for owner in owners
        for name, value in vars(owner).items()
        if name.startswith("_global_") and isinstance(value, dict)
    ]


def compiler_settings() -> list[Callable[[], Any]]:
    """What sets the configurations of torch's compiler, as far as it is loaded, to
    what they are now."""
    names = [f"torch.{each}.config" for each in ("_dynamo", "_inductor", "_functorch")]
    loaded = [sys.modules[each] for each in names if each in sys.modules]
    return [functools.partial(_set_values, each, _values(each)) for each in loaded]


@GATE.needs("torch._tensor_str:PRINT_OPTS")
def print_settings() -> Callable[[], Any]:
    """What sets how tensors are printed to what it is now."""
    options: Any = importlib.import_module("torch._tensor_str").PRINT_OPTS
    return functools.partial(torch.set_printoptions, **vars(options))


def _values(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config.get_config_copy()
    return found


def _set_values(config: Any, before: dict[str, Any]) -> None:
    for name, value in _values(config).items():
        if value != before[name]:
            setattr(config, name, before[name])


@GATE.needs("torch.nn.utils.parametrize:_cache_enabled")
@contextlib.contextmanager
def without_cached_weights() -> Iterator[None]:
    """Within it weights are computed where they are used. In a cache, of autocast or of
    `parametrize.cached()`, those of a pass under no_grad would be used later, without
    a graph."""
    parametrize: Any = importlib.import_module("torch.nn.utils.parametrize")
    num_entered = parametrize._cache_enabled
    has_cache = torch.is_autocast_cache_enabled()
    parametrize._cache_enabled = 0
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        parametrize._cache_enabled = num_entered
        torch.set_autocast_cache_enabled(has_cache)


# ---- processes ----


@GATE.needs("torch.cuda:_is_in_bad_fork")
def is_cuda_lost() -> bool:
    """Whether this process was forked from one that had used CUDA, and cannot."""
    is_lost: bool = torch.cuda._is_in_bad_fork()
    return is_lost


# ---- tensors and operators ----


@GATE.needs("torch:UntypedStorage._cdata")
def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of a storage, which several Python objects can stand for.

    `data_ptr()` is 0 for those that are empty, fake or on the meta device.
    """
    key: int = storage._cdata
    return key


@GATE.needs("torch:_is_functional_tensor")
def is_plain(value: Any) -> bool:
    """Whether it is a dense tensor with values of its own: what the most are, and seen
    at a tenth of the cost of `is_fake` and `is_traceable_wrapper_subclass`."""
    return (
        type(value) in _PLAIN
        and value.layout is torch.strided
        and not is_functorch_wrapped(value)
        and not torch._is_functional_tensor(value)
    )


@GATE.needs("torch:Tensor._indices", "torch:Tensor._values")
def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two dense tensors of a sparse one that need not be coalesced."""
    return tensor._indices(), tensor._values()


@GATE.needs("torch._ops:OpOverload._schema")
def schema_of(operator: Any) -> Any:
    """The name and arguments of an operator; None for one of higher order."""
    return getattr(operator, "_schema", None)


@GATE.needs("torch.autograd:_profiler_enabled")
def is_profiled() -> bool:
    """Whether a profiler is at work: torch.profiler does not say."""
    enabled: bool = torch.autograd._profiler_enabled()
    return enabled


@GATE.needs(
    "torch.autograd.profiler:profile._prepare_trace",
    "torch.autograd.profiler:profile._start_trace",
)
@contextlib.contextmanager
def refusing_profilers(error: Callable[[], Exception]) -> Iterator[None]:
    """While entered, no other profiler starts: torch ends the one that is at work, and
    crashes the process where both are written."""
    kind: Any = torch.autograd.profiler.profile
    names = ("_prepare_trace", "_start_trace")
    plain = {name: getattr(kind, name) for name in names}

    def refuse(profiler: Any) -> None:
        raise error()

    for name in names:
        setattr(kind, name, refuse)
    try:
        yield
    finally:
        for name in names:
            setattr(kind, name, plain[name])


@GATE.needs("torch._C:_are_functorch_transforms_active")
def is_transformed() -> bool:
    """Whether a transform of torch.func runs in this thread, as vmap or grad."""
    is_active: bool = torch._C._are_functorch_transforms_active()
    return is_active


@GATE.needs("torch._C:_current_graph_task_id")
def is_within_backward() -> bool:
    """Whether a backward pass runs in this thread: torch tells its hooks alone."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


@GATE.needs(
    "torch._C._autograd:_top_saved_tensors_default_hooks",
    "torch.utils.checkpoint:_checkpoint_hook",
)
def is_checkpointed() -> bool:
    """Whether a backward pass will compute again what runs here, for it is within
    `checkpoint(..., use_reentrant=False)`, and with gradients."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    name = getattr(hooks[0], "__qualname__", "") if hooks else ""
    return name.startswith(f"{checkpoint._checkpoint_hook.__qualname__}.")


@GATE.needs("torch:Tensor._backward_hooks", "torch:Tensor._post_accumulate_grad_hooks")
def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether something waits for a tensor's gradient: hooks can be added, not seen."""
    held: Any = tensor
    return bool(held._backward_hooks or held._post_accumulate_grad_hooks)


Hooks = OrderedDict[int, Callable[[torch.Tensor], Any]]
"""For the gradient of a tensor, by number."""


@GATE.needs("torch:Tensor._backward_hooks")
def hooks_of(tensor: torch.Tensor) -> Hooks:
    """Those for the gradient of a tensor, and those to come until something is written
    to it, which gives it other ones."""
    held: Any = tensor
    # Asked first: of a view autograd finds out here that its base has been written to,
    # and drops the hooks.
    function = held.grad_fn
    if held._backward_hooks is None:
        held._backward_hooks = OrderedDict()
        if function is not None:
            function._register_hook_dict(held)
    hooks: Hooks = held._backward_hooks
    return hooks


def share_hooks(tensor: torch.Tensor, own: torch.Tensor) -> Hooks:
    """Have hooks to come for the gradient of `tensor` called for that of `own`, until
    something is written to it. Returns those that `own` has."""
    held: Any = tensor
    hooks = hooks_of(own)
    if held.grad_fn is not None:  # asked as above
        held._backward_hooks = hooks
    return hooks


@GATE.needs("torch.nn:Module._forward_hooks")
def num_hooks(module: Any) -> int:
    """Of a module's forward and backward passes: hooks can be added, not seen."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, n)) for n in (*names, "_backward_pre_hooks"))


PARAMETERS = "_parameters"
"""The attribute in which a module has its own."""


@GATE.needs("torch.nn:Module._parameters")
def held_by(module: Any) -> Iterator[Any]:
    """What a module has in its attributes, also in lists and dicts, besides its
    parameters, which recurrent layers have in a list, too."""
    for name, value in vars(module).items():
        if name in (PARAMETERS, "_flat_weights"):
            continue
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


BOOKKEEPING = ("_backward_hooks", "_version")
"""Attributes of a tensor that autograd reads, and no user computes with."""


def tuple_like(value: tuple[Any, ...], items: Sequence[Any]) -> Any:
    """Of the same kind, which may be a named one."""
    kind: Any = type(value)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


@GATE.needs("torch:Tensor._base")
def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, if an operation has computed that; or itself."""
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


@GATE.needs("torch:Tensor._base")
def base_of_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is a view of; None of one that is none."""
    return tensor._base


@GATE.needs(*(f"torch._C._autograd:_{verb}_creation_meta" for verb in ("get", "set")))
def writable_view(tensor: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A view of what a function of autograd has returned in the place of `own`, of
    which it has the memory. It may be written to as `own`, where torch would refuse
    that: the history of this then goes around that function. Hooks for its gradient
    are those of `own`."""
    functions: Any = torch._C._autograd
    view: Any = tensor.view_as(tensor)
    allowed = functions.CreationMeta.DEFAULT
    if base_of_view(own) is not None:
        allowed = functions._get_creation_meta(own)
    functions._set_creation_meta(view, allowed)
    # And not its own, which torch gives a view that is written to through another one
    # (x[0] = 0) before it knows of that: it loses them, or crashes.
    view.register_hook = own.register_hook
    found: torch.Tensor = view
    return found


@GATE.needs("torch:Tensor._version")
def num_changes(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, as autograd counts it: in inference mode
    it does not."""
    return 0 if tensor.is_inference() else int(tensor._version)


@GATE.needs("torch.autograd:_unsafe_preserve_version_counter")
def uncounted_changes(
    tensor: torch.Tensor,
) -> contextlib.AbstractContextManager[None]:
    """Within it `num_changes` of a tensor stays as it is."""
    found: Any = torch.autograd
    kept: contextlib.AbstractContextManager[None]
    kept = found._unsafe_preserve_version_counter(tensor)
    return kept


@GATE.needs("torch.optim.lr_scheduler:LRScheduler.step")
def note_step_taken(optimizer: torch.optim.Optimizer) -> None:
    """Have schedulers know that a step was taken, which another process takes: they
    warn of an optimizer that they are ahead of."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


HOOKS_OF_STEP = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer with what the user has called around its step."""


@GATE.needs(*(f"torch.optim:Optimizer.{name}" for name in HOOKS_OF_STEP))
def has_step_hooks(optimizer: Any) -> bool:
    """Whether the user has anything called around an optimizer's step."""
    before, after = HOOKS_OF_STEP
    return bool(getattr(optimizer, before) or getattr(optimizer, after))


@GATE.needs(*(f"torch.optim:Optimizer.{name}" for name in HOOKS_OF_STEP))
def call_step_hooks(optimizer: torch.optim.Optimizer, *, is_before: bool) -> None:
    """Do what torch does before, or after, a step that another process takes."""
    # An optimizer that wraps another may have none, as torch would find in its step().
    hooks = getattr(optimizer, HOOKS_OF_STEP[0 if is_before else 1], {})
    for hook in list(hooks.values()):
        hook(optimizer, (), {})


@contextlib.contextmanager
@GATE.needs(*(f"torch.optim:Optimizer.{name}" for name in HOOKS_OF_STEP))
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it torch does nothing of that around the optimizer's step."""
    kept = {name: getattr(optimizer, name) for name in HOOKS_OF_STEP}
    vars(optimizer).update({name: OrderedDict() for name in HOOKS_OF_STEP})
    try:
        yield
    finally:
        vars(optimizer).update(kept)


# ---- autograd ----


@GATE.needs("torch.distributed._functional_collectives")
def all_gather_with_gradients() -> str:
    """The full name of PyTorch's all-gather that passes gradients on.

    That of `torch.distributed.nn.functional` is deprecated since 2.13.
    """
    from torch.distributed import _functional_collectives as module

    names = ("all_gather_single_autograd", "all_gather_tensor_autograd")
    return next(f"{module.__name__}.{name}" for name in names if hasattr(module, name))


@GATE.needs("torch.autograd:_engine_run_backward")
def wrap_backward(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap` of it in the place of what every backward pass comes through, once.

    Hooks of tensors and nodes see one graph; there is none for all passes.
    """
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward
    if not hasattr(original, "__wrapped__"):
        autograd._engine_run_backward = functools.wraps(original)(wrap(original))


@GATE.needs("torch._dynamo.compiled_autograd:_disable")
def without_compiled_autograd() -> contextlib.AbstractContextManager[None]:
    """Have backward passes run as they are, where the loop has them compiled."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is None or not module.compiled_autograd_enabled:
        return contextlib.nullcontext()
    disabled: contextlib.AbstractContextManager[None] = module._disable()
    return disabled


@GATE.needs("torch.autograd:Variable._execution_engine")
def call_after_backward(function: Callable[[], None]) -> None:
    """Have autograd call a function at the end of the pass under way, as DDP does."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def saved_number(node: Any, name: str) -> Any:
    """What a node of the graph has saved that is no tensor; None where it has not."""
    return getattr(node, f"_saved_{name}", None)


def saved_value(node: Any, name: str) -> Any:
    """A tensor or number that is saved for the backward pass; None where hooks keep
    it, which may compute it again. Of a DTensor this rank's part.

    Old versions, as 2.9, do not say whether hooks do: there these are asked.
    """
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None or not hasattr(saved, "unpack_hook"):
        return _part(getattr(node, f"_saved_{name}", None))
    return _part(saved.data) if saved.unpack_hook is None else None


def _part(tensor: Any) -> Any:
    """What a DTensor has of its own: without dispatch, in which graphs are looked at,
    any other use of it ends the process."""
    return getattr(tensor, "_local_tensor", tensor)


def saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    """Those that a node of the graph has saved, but for what hooks keep. Old versions,
    as 2.9, do not say whether hooks do: none there."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            found = getattr(node, name)
            for each in found if isinstance(found, tuple | list) else (found,):
                if getattr(each, "unpack_hook", each) is None and each.data is not None:
                    yield _part(each.data)


@GATE.needs("torch.autograd.graph:Node._input_metadata")
def outputs_of(node: Any) -> Any:
    """Shape and type of what an operation gave, which are its gradients' too."""
    return getattr(node, "_input_metadata", ())


@GATE.needs("torch.amp:GradScaler._per_optimizer_states")
def forget_unscaling(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> None:
    """Let `scaler.unscale_` be called again: it refuses a second time in a step."""
    scaler._per_optimizer_states.pop(id(optimizer), None)


@GATE.needs("torch.amp:GradScaler._unscale_grads_")
@contextlib.contextmanager
def unscaling_by(unscale: Callable[[Any, Unscale], Overflows]) -> Iterator[None]:
    """Have gradients of an optimizer unscaled by `unscale(optimizer, take)`, where
    `take` is what every GradScaler does with what has `param_groups`."""
    scaler_type: Any = torch.amp.GradScaler
    original = scaler_type._unscale_grads_

    def unscale_grads(scaler: Any, optimizer: Any, *args: Any, **kw: Any) -> Overflows:
        return unscale(optimizer, lambda each: original(scaler, each, *args, **kw))

    scaler_type._unscale_grads_ = unscale_grads
    try:
        yield
    finally:
        scaler_type._unscale_grads_ = original


def unscaled_before_step(optimizer_type: Any) -> Any:
    """A class of optimizers whose gradients a GradScaler unscales before their step, as
    it leaves to a fused optimizer, with the step itself where they overflow."""
    optimizer_type._step_supports_amp_scaling = False
    return optimizer_type


def load_compiler() -> None:
    """Import torch._dynamo, as the first optimizer of a process does, in 1.6 s."""
    importlib.import_module("torch._dynamo")


def eagerly() -> contextlib.AbstractContextManager[None]:
    """Have what the loop has compiled run as if it were not, also with `fullgraph=True`
    (`torch.compiler.set_stance`)."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[None]
    stance = torch.compiler.set_stance("force_eager")
    return stance


# ---- modules ----


@contextlib.contextmanager
def in_place_conversion() -> Iterator[None]:
    """Within it `module.to` sets `.data` of parameters, as is usual, also where a loop
    has chosen that they are swapped: none can be that something refers to."""
    chosen = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(chosen)


@GATE.needs("torch.nn:Module._buffers")
def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of a module itself, also those that are None so far."""
    return module._buffers


def about_modules(state_dict: Any) -> Any:
    """What a state dict says of each module beside its tensors, such as a version; None
    where it is another dict."""
    return getattr(state_dict, "_metadata", None)


@GATE.needs("torch.nn:Module._non_persistent_buffers_set")
def transient_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module itself that its state dict does not have."""
    names = module._non_persistent_buffers_set
    return {n: b for n, b in module.named_buffers(recurse=False) if n in names}


@GATE.needs("torch.nn:Module._forward_pre_hooks")
def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """The hooks of a module, of which some are what weight norms are made of."""
    return list(module._forward_pre_hooks.values())


@GATE.needs(
    *("torch.nn:Module._parameters", "torch.nn:Module._forward_hooks"),
    *("torch.nn:Module._forward_pre_hooks", "torch.nn:Module._backward_hooks"),
)
def drop_hooks_of(package: str, module: nn.Module) -> None:
    """Give a module tables of its own, of which the hooks lack those of a package."""
    own = vars(module)
    own["_parameters"] = dict(own["_parameters"])
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
        own[name] = OrderedDict(
            (key, hook)
            for key, hook in own[name].items()
            if not str(getattr(hook, "__module__", "")).startswith(package)
        )


@GATE.needs("torch.nn:Module._compiled_call_impl")
def undo_compile(module: nn.Module) -> None:
    """Take back `module.compile()`."""
    module._compiled_call_impl = None


@GATE.needs("torch._dynamo:OptimizedModule._orig_mod")
def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` gave this module, which holds the plain one."""
    return "_orig_mod" in dict(model.named_children())


@GATE.needs("torch.nn:MultiheadAttention._reset_parameters")
def reset_of(module: nn.Module) -> Any:
    """What gives a module its first values, if it says so: `reset_parameters`.

    MultiheadAttention and Transformer have it under another name.
    """
    names = ("reset_parameters", "_reset_parameters")
    return next((getattr(module, n) for n in names if hasattr(module, n)), None)


@GATE.needs("torch.nn.utils.parametrizations:_SpectralNorm._u")
def dtype_of_power_iteration(module: nn.Module, weight: torch.Tensor) -> torch.dtype:
    """The precision that a spectral norm computes in; it has no buffers for vectors."""
    dtype: torch.dtype = getattr(module, "_u", weight).dtype
    return dtype


# ---- the loader ----


@contextlib.contextmanager
@GATE.needs(f"{_LOADER}._next_index", f"{_LOADER}.__next__")
def watching_loaders(
    on_drawn: Callable[[Any, Any], None], on_end: Callable[[Any], None]
) -> Iterator[None]:
    """Call `on_drawn(iterator, indices)` for each batch that any DataLoader draws, and
    `on_end(iterator)` when it has no more.

    A sampler knows what was asked of it, not which loader, nor what was used.
    """
    kind: Any = _BaseDataLoaderIter
    next_index, next_batch = kind._next_index, kind.__next__

    def noted(iterator: Any) -> Any:
        found = next_index(iterator)
        on_drawn(iterator, found)
        return found

    def ended(iterator: Any) -> Any:
        try:
            return next_batch(iterator)
        except StopIteration:
            on_end(iterator)
            raise

    kind._next_index, kind.__next__ = noted, ended
    try:
        yield
    finally:
        kind._next_index, kind.__next__ = next_index, next_batch


@GATE.needs(f"{_LOADER}._index_sampler")
def sampler_of(iterator: Any) -> Any:
    """What gives an iterator of a DataLoader the indices of a batch."""
    return iterator._index_sampler


@GATE.needs(f"{_LOADER}._dataset")
def dataset_of(iterator: Any) -> Any:
    """What an iterator of a DataLoader draws from."""
    return iterator._dataset


MOST_BYTES_OF_SOCKET = 103
"""Of its path, on macOS; Linux takes 107."""


def keep_sockets_of_workers_in(folder: str) -> None:
    """Have multiprocessing make its sockets here: DataLoader workers that are killed
    cannot remove a folder of their own.

    Made again where it is gone: what tidies up /tmp may have removed it, and a worker
    without it would send nothing, and be waited for. Nothing is done where a socket's
    path would be longer than the system takes.
    """
    if len(os.fsencode(folder)) + len("/listener-") + 8 > MOST_BYTES_OF_SOCKET:
        return

    def in_folder() -> str:
        os.makedirs(folder, 0o700, exist_ok=True)  # noqa: PTH103
        return folder

    process: Any = multiprocessing.process.current_process()
    process._config.update(tempdir=folder)  # of those that are not forked
    multiprocessing.util.get_temp_dir = in_folder


# ---- extensions in C++ ----


@GATE.needs("torch.utils.cpp_extension:_write_ninja_file_and_build_library")
def wrap_build(
    module: Any, wrap: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
    """Replace what compiles an extension on demand, in torch.utils.cpp_extension.

    `load` is imported by name, by DeepSpeed for one, before anybody can replace it.
    """
    build = module._write_ninja_file_and_build_library
    module._write_ninja_file_and_build_library = wrap(build)
