"""Moves a batch of any structure to a device."""

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any

import torch

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
        if isinstance(value, MutableMapping):
            found: Any = copy.copy(value)
            for key, each in value.items():
                found[key] = to_device(each, device)
            return found
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found = copy.copy(value)
            for field in dataclasses.fields(value):
                each = to_device(getattr(value, field.name), device)
                object.__setattr__(found, field.name, each)  # it may be frozen
            return found
        return value

    return tree_map(moved, batch, is_leaf=has_to)


def has_to(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))
