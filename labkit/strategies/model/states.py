"""The states of a model and its optimizer, by name: the same under every strategy.

`model.<name>` is a parameter or buffer in its plain shape, tied ones once, under their
first name; `optimizer.<name>.<key>` is what the optimizer keeps of that parameter.
"""

from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterator
from collections.abc import Mapping
from operator import methodcaller
from typing import Any
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor

from labkit.compat.torch import buffers_of
from labkit.compat.torch import tree_map_only

Named = dict[str, torch.Tensor]

Restore = Callable[[], None]

# How an optimizer computes is for the place where it runs, not for a checkpoint.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})


class Source(Protocol):
    """Where states come from: a `labkit.checkpoint.Checkpoint`."""

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None: ...


class Held:
    """A `Source` of tensors that are here, whole on every rank."""

    def __init__(self, held: Named) -> None:
        self._held = held
        self.tensors = {name: (tuple(t.shape), t.dtype) for name, t in held.items()}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """They are those of this very model."""

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(self._held[name])


class HeldOptimizer(Held):
    """A `Source` of an optimizer's states alone, whole on every rank; also for tensors
    that are in parts."""

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name not in self._held:
                continue
            value = self._held[name]
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, tensor.placements
                value = distribute_tensor(value.to(tensor.device), mesh, placements)
            tensor.copy_(value)


def named_states(
    state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: list[list[str]],
) -> tuple[HeldOptimizer, dict[str, Any]]:
    """The states in a plain optimizer's `state_dict()`, by name, and the settings.
    ValueError where its groups are others than those of `optimizer`."""
    groups = state_dict["param_groups"]
    sizes, ours = [len(each["params"]) for each in groups], list(map(len, names))
    if sizes != ours:
        raise ValueError(
            f"the state dict is of an optimizer with groups of {sizes} parameters, "
            f"and this one has groups of {ours}; make it as it was when that was saved"
        )
    held: Named = {}
    for group, params in zip(groups, names, strict=True):
        for number, name in zip(group["params"], params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if value is not None:
                    label = f"optimizer.{name}.{key}"
                    held[label] = as_tensor(value, label)
    values = {
        "optimizer": type(optimizer).__name__,
        "param_groups": [
            {**group, "params": params}
            for group, params in zip(groups, names, strict=True)
        ],
    }
    return HeldOptimizer(held), values


def model_tensors(module: nn.Module) -> Named:
    """Parameters and persistent buffers, each once."""
    found: Named = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"the model's state_dict() has {name}, which is "
                f"{type(value).__name__}; a checkpoint holds only the parameters and "
                "buffers of a model. Leave it out of state_dict() and pass it by name: "
                "save_checkpoint(folder, extra=...)"
            )
        if id(value) not in seen:
            seen.add(id(value))
            found[f"model.{name}"] = value
    return found


def separate_buffers(module: nn.Module) -> None:
    """Give every element of the buffers a place of its own, so that they can be
    received: expanded ones have one for several."""
    for each in module.modules():
        for name, buffer in buffers_of(each).items():
            if buffer is not None and 0 in buffer.stride():
                buffers_of(each)[name] = buffer.contiguous()


def plain_shape(tensor: Any) -> tuple[int, ...]:
    """A parameter's shape, also where stage 3 has put it in parts."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def parameter_names(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> list[list[str]]:
    """Names of the parameters of every group of an optimizer; "" for one that is not
    the model's."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [names.get(id(parameter), "") for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Those of all its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def check_names(names: list[list[str]]) -> None:
    """ValueError if an optimizer has parameters that are not the model's."""
    for number, group in enumerate(names):
        if "" in group:
            raise ValueError(
                f"parameter {group.index('')} of the optimizer's group {number} is not "
                "the model's, so it has no name in a checkpoint; make it a part of the "
                "model"
            )


def hyperparameters(
    optimizer: torch.optim.Optimizer, names: list[list[str]]
) -> dict[str, Any]:
    """An optimizer's kind, and the settings of its groups."""
    check_names(names)
    return {
        "optimizer": type(optimizer).__name__,
        "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": params,
            }
            for group, params in zip(optimizer.param_groups, names, strict=True)
        ],
    }


def check_hyperparameters(
    optimizer: torch.optim.Optimizer, names: list[list[str]], values: Mapping[str, Any]
) -> None:
    """ValueError unless the saved settings are those of such an optimizer."""
    check_names(names)
    saved, kind = values.get("param_groups"), values.get("optimizer")
    if kind != type(optimizer).__name__ or not isinstance(saved, list):
        raise ValueError(
            f"the checkpoint's optimizer is {kind!r:.40} and this one "
            f"{type(optimizer).__name__}; make the same, or load the model alone with "
            "load_checkpoint(folder, model=model)"
        )
    there = [group.get("params") for group in saved if isinstance(group, dict)]
    if there != names:
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} groups of "
            f"{', '.join(str(len(g)) for g in there if isinstance(g, list))} parameters"
            f" and this one {len(names)} of {', '.join(str(len(g)) for g in names)}, "
            "or parameters of other names; make it of the same ones in the same order"
        )
    for number, (group, settings) in enumerate(
        zip(optimizer.param_groups, saved, strict=True)
    ):
        for key, value in settings.items():
            if key in group and not is_alike(group[key], value):
                raise ValueError(
                    f"the checkpoint has {key} = {value!r:.40} for the optimizer's "
                    f"group {number}, which has {group[key]!r:.40}; make the optimizer "
                    "with a setting of the same type"
                )
    scaler = values.get("scaler") or {}
    if not isinstance(scaler, dict) or not all(
        isinstance(value, int | float) for value in scaler.values()
    ):
        raise ValueError(
            "the checkpoint's loss scaler is damaged: its state is not a dict of "
            "numbers; load another checkpoint"
        )


def is_alike(one: Any, other: Any) -> bool:
    """Whether two settings are of a kind: a learning rate may be a tensor, too."""
    kinds = (int | float | torch.Tensor, tuple | list, str, dict)
    return (
        one is None
        or other is None
        or any(isinstance(one, kind) and isinstance(other, kind) for kind in kinds)
    )


def set_hyperparameters(
    optimizer: torch.optim.Optimizer, values: Mapping[str, Any]
) -> None:
    """Set the groups' settings to the saved ones; learning rates in place."""
    for group, saved in zip(
        optimizer.param_groups, values["param_groups"], strict=True
    ):
        for key, value in saved.items():
            if key == "params" or key in IMPLEMENTATION:
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def optimizer_states(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> Named:
    """What an optimizer keeps of its parameters."""
    return {
        f"optimizer.{name}.{key}": as_tensor(value, f"optimizer.{name}.{key}")
        for group, params in zip(optimizer.param_groups, names, strict=True)
        for parameter, name in zip(group["params"], params, strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def move_states(optimizer: torch.optim.Optimizer) -> None:
    """Bring what an optimizer keeps of its parameters to the devices that these are on
    now; a count of steps stays where it is, but where one kernel updates all.

    Source: `torch.optim.Optimizer.load_state_dict`, which moves what it is given.
    """
    for group in optimizer.param_groups:
        counts_on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            state: Any = optimizer.state.get(parameter)
            move = methodcaller("to", parameter.device)
            for key, value in state.items() if isinstance(state, dict) else ():
                if key != "step" or counts_on_device:
                    state[key] = tree_map_only(torch.Tensor, move, value)


def as_tensor(value: Any, name: str) -> torch.Tensor:
    """A state as a tensor; old optimizers count their steps in plain numbers."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64)
    raise ValueError(
        f"{name} is {type(value).__name__}; a checkpoint holds only the tensors and "
        "numbers of an optimizer's state. Save the model alone with "
        "save_checkpoint(folder, model=model)"
    )


def saved_keys(source: Source, name: str) -> list[str]:
    """What the checkpoint has of an optimizer's state of the parameter `name`."""
    prefix = f"optimizer.{name}."
    return [
        key
        for each in source.tensors
        if each.startswith(prefix) and "." not in (key := each.removeprefix(prefix))
    ]


def check_all_taken(source: Source, kind: str, taken: Mapping[str, Any]) -> None:
    """ValueError if the checkpoint has other tensors of `kind` than `taken`."""
    there = {name for name in source.tensors if name.startswith(f"{kind}.")}
    if more := sorted(there - set(taken)):
        raise ValueError(
            f"the checkpoint has {more[0]} "
            f"{f'and {len(more) - 1} more ' if len(more) > 1 else ''}that this {kind} "
            "does not have; make it as it was when the checkpoint was saved"
        )


def restoring(
    source: Source,
    values: Mapping[str, Any],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    names: list[list[str]],
    absent: Container[str] = (),
) -> Restore:
    """What sets a model, and its optimizer if given, to what a checkpoint has, but for
    the parameters `absent`, which this rank does not have.

    Raises ValueError where they do not fit; nothing is changed before it is called.
    """
    model = model_tensors(module)
    source.check(model)
    check_all_taken(source, "model", model)
    here = {n: t for n, t in model.items() if n.removeprefix("model.") not in absent}
    if optimizer is None:
        return lambda: source.fill(here)
    check_hyperparameters(optimizer, names, values)
    state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    fresh: Named = {}
    unused: Named = {}
    for group, params in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], params, strict=True):
            for key in saved_keys(source, name):
                if name in absent:
                    unused[f"optimizer.{name}.{key}"] = parameter
                    continue
                tensor = allocated(source, f"optimizer.{name}.{key}", parameter, group)
                fresh[f"optimizer.{name}.{key}"] = tensor
                state.setdefault(parameter, {})[key] = tensor
    check_all_taken(source, "optimizer", {**fresh, **unused})

    def restore() -> None:
        source.fill({**here, **fresh})
        optimizer.state.clear()
        optimizer.state.update(state)
        set_hyperparameters(optimizer, values)

    return restore


def allocated(
    source: Source, name: str, parameter: torch.Tensor, group: Mapping[str, Any]
) -> torch.Tensor:
    """An empty tensor for a state of `parameter`, sharded as that is."""
    shape, dtype = source.tensors[name]
    if shape == tuple(parameter.shape):
        return torch.empty_like(
            parameter, dtype=dtype, memory_format=torch.preserve_format
        ).detach()
    if isinstance(parameter, DTensor) and shape:
        raise ValueError(
            f"the checkpoint has {name} in shape {shape}, its parameter has "
            f"{tuple(parameter.shape)}; a sharded model takes states of its own shape"
        )
    # A step count is on the CPU, unless the update runs as one kernel with it.
    on_device = shape or group.get("capturable") or group.get("fused")
    return torch.empty(
        shape, dtype=dtype, device=parameter.device if on_device else "cpu"
    )
