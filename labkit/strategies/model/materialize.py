"""Hands a model over part by part, with values: no device has to hold the whole of it.

A model built under `torch.device("meta")` has shapes and no values. It gets them on the
CPU, a part at a time, from the `reset_parameters` of its modules, the innermost first:
the order in which constructors call them. So every strategy begins with the same values
and, where a constructor does no more than that, with those of a model built on the CPU.
"""

import copy
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import TorchDispatchMode
from labkit.compat.torch import reset_of
from labkit.compat.torch import schema_of
from labkit.compat.torch import storage_key
from labkit.strategies.model.gradients import SHAPES

FROM_META = (
    "the model is built on the meta device: its modules' reset_parameters() give it "
    "its values, with the run's seed. Whatever else a constructor does, such as "
    "self.apply(initialize), is not done; move it into reset_parameters()"
)

TAKEN_BEFORE = (
    "the loop uses a parameter that it has taken from the model before prepare, which "
    "under this strategy has put parts in its place: to clip, set, freeze or penalize "
    "it would change nothing. Take parameters after prepare, for example params = "
    "list(model.parameters()), or use ddp, zero1 or zero2"
)

Part = tuple[nn.Module, list[torch.Tensor]]


def parts(model: nn.Module, units: Sequence[nn.Module] = ()) -> Iterator[Part]:
    """The units of a model as they get their values, and at last the model itself.

    With each the tensors in it that no part before it had, where the model's are: on
    the CPU if they had no values. The taker may move, shard or replace them. Units that
    are in others come before them, in `units` too.
    """
    whole = {unit: set(unit.modules()) for unit in units}
    inner = {
        unit: [each for each in whole if each is not unit and each in modules]
        for unit, modules in whole.items()
    }
    around = {
        unit: [m for m in unit.modules() if not any(m in whole[i] for i in inner[unit])]
        for unit in units
    }
    inside = set().union(*whole.values())
    around[model] = [module for module in model.modules() if module not in inside]
    resets = find_resets(model)
    order = list(innermost_first(model))
    place = {module: number for number, (_, module) in enumerate(order)}
    # A unit waits for the last module that sets a tensor of it: it may be outside.
    ready: dict[int, list[nn.Module]] = {}
    last: dict[nn.Module, int] = {}
    for unit, modules in around.items():
        setters = {place[module] for module in modules}
        for module in modules:
            setters |= {place[setter] for setter in resets.setters.get(module, ())}
        setters |= {last[each] for each in inner.get(unit, ())}
        last[unit] = max(setters)
        ready.setdefault(last[unit], []).append(unit)
    for number, (_, module) in enumerate(order):
        for tensor in own_tensors(module):
            if tensor.is_meta:
                allocate(tensor)
        if module in resets.called:
            reset_of(module)()
        for unit in ready.get(number, ()):
            found = itertools.chain.from_iterable(map(own_tensors, around[unit]))
            yield unit, list({id(tensor): tensor for tensor in found}.values())


def is_from_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer of a model has no values yet."""
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def check_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the tensors on the meta device that only a checkpoint can set.

    Raises UnsupportedLoopError, and changes nothing, where nothing can set one.
    """
    if not is_from_meta(model):
        return []
    for state in optimizer.state.values():
        if any(isinstance(t, torch.Tensor) and t.is_meta for t in state.values()):
            raise UnsupportedLoopError(
                f"{type(optimizer).__name__} made its state from parameters on the "
                "meta device, where nothing has values; build the model on the CPU, or "
                "take an optimizer that makes its state in the first step, like AdamW"
            )
    unset = find_resets(model).unset
    saved = model.state_dict(keep_vars=True)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in unset:
        if name not in saved or not tensors[name].is_floating_point():
            raise UnsupportedLoopError(without_values(model, name))
    return unset


def until_set(model: nn.Module, names: list[str]) -> Callable[[Any, Any], None]:
    """A forward pre-hook: UnsupportedLoopError where a tensor of `names` has no values
    still."""

    def check(module: nn.Module, args: Any) -> None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name in names:
            if held_here(tensors[name]).isnan().any():
                raise UnsupportedLoopError(
                    f"{without_values(model, name)}; or call load_checkpoint(folder) "
                    "before the first batch"
                )
        names.clear()

    return check


def held_here(tensor: Any) -> torch.Tensor:
    """What this rank has of a tensor, sharded by FSDP or ZeRO-3 or not."""
    tensor = local_part(tensor)
    held: torch.Tensor = getattr(tensor, "ds_tensor", tensor)
    return held.detach()


def without_values(model: nn.Module, name: str) -> str:
    owner, _, own_name = name.rpartition(".")
    kind = type(model.get_submodule(owner))
    kind = next(c for c in kind.__mro__ if not c.__name__.startswith("FSDP"))
    return (
        f"the model is on the meta device, and nothing gives {name} its values; give "
        f"{kind.__name__} a method reset_parameters() that sets {own_name} in place, "
        "or build the model on the CPU"
    )


@dataclass
class Resets:
    """Which modules' `reset_parameters` give a model its values."""

    called: set[nn.Module] = field(default_factory=set)
    setters: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)
    """For a module that has tensors, those that set one of them."""
    unset: list[str] = field(default_factory=list)
    """Tensors on the meta device that none of them sets."""


def find_resets(model: nn.Module) -> Resets:
    """What would give the values to what of a model is on the meta device.

    It is seen, not assumed: all is tried on a copy that has no values.
    """
    found = Resets()
    if not is_from_meta(model):
        return found
    twin = empty_copy(model)
    modules = [module for _, module in innermost_first(model)]
    twins = list(innermost_first(twin))
    holders: dict[int, list[nn.Module]] = {}
    names: dict[int, str] = {}
    for module, (prefix, other) in zip(modules, twins, strict=True):
        own = own_names(module), own_tensors(module), own_tensors(other)
        for name, tensor, copied in zip(*own, strict=True):
            if tensor.is_meta:
                key = storage_key(copied.untyped_storage())
                holders.setdefault(key, []).append(module)
                names.setdefault(key, f"{prefix}.{name}".lstrip("."))
    alive = [own_tensors(other) for _, other in twins]  # or keys would come again
    is_set: set[int] = set()
    for module, (_, other), before in zip(modules, twins, alive, strict=True):
        reset = reset_of(other)
        if reset is None:
            continue
        with Writes() as writes:
            try:
                reset()
            except (NotImplementedError, RuntimeError):
                # It needs values: it sets what is its own, as they do by convention.
                writes.storages |= {storage_key(t.untyped_storage()) for t in before}
        now = own_tensors(other)
        for tensor, later in zip(before, now, strict=False):
            if tensor is not later and not isinstance(tensor, nn.Parameter):
                writes.storages.add(
                    storage_key(tensor.untyped_storage())
                )  # a new buffer
        written = writes.storages & names.keys()
        if written:
            found.called.add(module)
        for key in written:
            for holder in holders[key]:
                found.setters.setdefault(holder, []).append(module)
        is_set |= written
    found.unset = [name for key, name in names.items() if key not in is_set]
    return found


class Writes(TorchDispatchMode):
    """The storages that operators write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(schema_of(func).arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if argument.is_write and isinstance(value, torch.Tensor):
                self.storages.add(storage_key(value.untyped_storage()))
        return func(*args, **kwargs)


def innermost_first(
    module: nn.Module, prefix: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name, once, after all that are in it."""
    seen = set() if seen is None else seen
    seen.add(module)
    for name, child in module.named_children():
        if child not in seen:
            yield from innermost_first(child, f"{prefix}.{name}".lstrip("."), seen)
    yield prefix, module


def own_names(module: nn.Module) -> list[str]:
    return [
        *(name for name, _ in module.named_parameters(recurse=False)),
        *(name for name, _ in module.named_buffers(recurse=False)),
    ]


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """A module's parameters and buffers, without those of its children."""
    named = (module.named_parameters, module.named_buffers)
    return [tensor for each in named for _, tensor in each(recurse=False)]


def empty_copy(model: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def allocate(tensor: torch.Tensor) -> None:
    """Give a tensor on the meta device memory of the CPU, with NaN in it.

    It stays the same object: optimizers and tied modules keep it.
    """
    new = torch.empty_like(tensor, device="cpu").detach()
    if new.is_floating_point():
        new.fill_(torch.nan)
    else:
        new.zero_()
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)


def give_values(model: nn.Module) -> None:
    """Give all of a model's tensors on the meta device their values, on the CPU."""
    for _ in parts(model):
        pass


def move(tensor: torch.Tensor, device: torch.device) -> None:
    """Bring a tensor to a device, with its elements in their plain order, as
    collectives need them; it stays the same object."""
    if tensor.device != device or not tensor.is_contiguous():
        tensor.data = tensor.detach().to(device).contiguous()


def release(tensors: list[torch.Tensor], part: nn.Module) -> None:
    """Free the memory of parameters that `part` no longer has: others may still hold
    them, as the user's optimizer does, and a list of the loop's own."""
    there = {id(parameter) for _, parameter in part.named_parameters()}
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter) and id(tensor) not in there:
            shape = torch.empty(tensor.shape, device="meta")
            tensor.data = tensor.detach().new_empty(0)
            if type(tensor) is nn.Parameter:
                tensor.__class__ = Replaced
                vars(tensor)["shape_before"] = shape


class Replaced(nn.Parameter):
    """A parameter that the model no longer has. A loop may still count it."""

    shape_before: torch.Tensor
    """Without values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__repr__:
            return "of the model before prepare"
        with DisableTorchFunctionSubclass():
            if func in SHAPES:
                return func(args[0].shape_before, *args[1:], **(kwargs or {}))
            if func in _FACTS:
                return func(*args)
        raise UnsupportedLoopError(TAKEN_BEFORE)


_FACTS = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "is_leaf", "layout", "requires_grad")
}
"""What it is like, as its successor. Not where: that may be on another device."""
