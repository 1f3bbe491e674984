"""The tensors in a batch of any structure: where they are, and on which device."""

import copy
import dataclasses
from collections.abc import Iterator
from collections.abc import MutableMapping
from typing import Any

import torch

from labkit.compat.torch import tree_leaves
from labkit.compat.torch import tree_map


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of any structure with its tensors on `device`: also those in what has a
    `to(device)` of its own, in dataclasses and in mappings of any class."""
    if device.type == "cpu":
        return batch

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if device.type == "cuda" and value.device.type == "cpu":
                # Of other memory the copy would wait for all that the GPU has to do.
                value = value.pin_memory()
            return value.to(device, non_blocking=True)
        if has_to(value):
            return value.to(device)
        parts = parts_of(value)
        if not parts:
            return value
        found: Any = copy.copy(value)
        for key, each in parts.items():
            if isinstance(value, MutableMapping):
                found[key] = to_device(each, device)
            else:  # it may be frozen
                object.__setattr__(found, key, to_device(each, device))
        return found

    return tree_map(moved, batch, is_leaf=has_to)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Those that `to_device` moves."""
    for value in tree_leaves(batch):
        if isinstance(value, torch.Tensor):
            yield value
        elif parts := parts_of(value):
            yield from tensors_in(list(parts.values()))
        elif has_to(value):
            own = getattr(value, "__dict__", {}).values()
            yield from tensors_in([*filter(is_plain, own)])


def parts_of(value: Any) -> dict[Any, Any]:
    """What a mapping of any class, or a dataclass, has by key or field."""
    if isinstance(value, MutableMapping):
        return dict(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}
    return {}


def is_plain(value: Any) -> bool:
    """Whether it does not lead back to what holds it."""
    return isinstance(value, torch.Tensor | MutableMapping)


def has_to(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))
