"""Values that are no tensors, as JSON and back: tuples, other keys and tensors too."""

from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def encode(value: Any, name: str, tensors: Tensors) -> Any:
    """`value` as JSON has it; tensors in it go into `tensors`, named from `name` on.

    Raises ValueError for what is neither.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        # Of numpy's kinds there are some that are no subclass of these.
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a.b": x, "a": {"b": y}}
            name += "'"
        tensors[name] = value
        return {"~tensor": name}
    if isinstance(value, list | tuple):
        items = [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"~tuple": items}
    if isinstance(value, dict):
        keys = list(value)
        items = [encode(v, f"{name}.{k}", tensors) for k, v in value.items()]
        if all(isinstance(key, str) and not key.startswith("~") for key in keys):
            return dict(zip(keys, items, strict=True))
        keys = [encode(key, f"{name}.{key}", tensors) for key in keys]
        return {"~dict": [list(pair) for pair in zip(keys, items, strict=True)]}
    raise ValueError(
        f"{name} is {type(value).__name__} {value!r:.40}; a checkpoint holds tensors, "
        "numbers, strings, None, and lists, tuples and dicts of them"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """What `encode` was given; `tensor(name)` gives the tensor of a name."""
    if isinstance(value, list):
        return [decode(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"~tensor": str(name), **rest} if not rest:
            return tensor(name)
        case {"~tuple": list(items), **rest} if not rest:
            return tuple(decode(each, tensor) for each in items)
        case {"~dict": list(items), **rest} if not rest:
            return {decode(key, tensor): decode(v, tensor) for key, v in items}
    return {key: decode(each, tensor) for key, each in value.items()}
