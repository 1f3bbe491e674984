"""An optimizer on its way to a server, and its state on the way back."""

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from types import FunctionType
from typing import Any

import torch

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import HOOKS_OF_STEP
from labkit.serialization import PortablePickler
from labkit.strategies.autograd.agreement import plain

OFFER = "labkit/parameter_server"
"""Where in the group's store workers leave optimizers for servers."""
Settings = list[dict[str, Any]]
"""Of each group of an optimizer, those that are numbers or words."""

_LEFT_HERE = ("step", "state", *HOOKS_OF_STEP)
"""A scheduler's wrapper of `step`, what is sent by itself, and what is called around
the step of a worker."""


class _Pickler(PortablePickler):
    """Pickles an optimizer with numbers in the place of its parameters."""

    def __init__(self, file: Any, numbers: Mapping[int, int]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = numbers

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._numbers.get(id(value))
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and hasattr(value, "hooked"):
            # What torch puts around the `step` of a class, with this process's hooks.
            return _same, (value.__wrapped__,)  # type: ignore[attr-defined]
        return super().reducer_override(value)


def _same(value: Any) -> Any:
    return value


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._parameters = parameters

    def persistent_load(self, number: Any) -> Any:
        return self._parameters[number]


def packed(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> bytes:
    """An optimizer without its state and `parameters`; UnsupportedLoopError for one
    that belongs to this process."""
    kind = type(optimizer)
    attributes = {k: v for k, v in vars(optimizer).items() if k not in _LEFT_HERE}
    numbers = {id(each): number for number, each in enumerate(parameters)}
    file = io.BytesIO()
    try:
        _Pickler(file, numbers).dump((kind, attributes))
    except Exception as error:  # whatever a value's own __reduce__ may raise
        raise UnsupportedLoopError(
            f"{kind.__name__} cannot be sent to a server, which steps in its place: "
            f"{error}. Make it of what can be pickled, or use ddp"
        ) from error
    return file.getvalue()


def unpacked(
    payload: bytes, parameters: Sequence[torch.Tensor]
) -> torch.optim.Optimizer:
    """What `packed` was given, over these parameters."""
    kind, attributes = _Unpickler(io.BytesIO(payload), parameters).load()
    optimizer: torch.optim.Optimizer = kind.__new__(kind)
    vars(optimizer).update(attributes)
    optimizer.state = defaultdict(dict)
    optimizer.__setstate__({})
    return optimizer


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Those that the groups have now."""
    return [
        {
            key: found
            for key, value in group.items()
            if key != "params" and (found := plain(value)) is not None
        }
        for group in optimizer.param_groups
    ]


def changes(before: Settings, after: Settings) -> Settings:
    """What is another one, or new, in `after`."""
    return [
        {key: value for key, value in new.items() if old.get(key, _NONE) != value}
        for old, new in zip(before, after, strict=True)
    ]


_NONE = object()


def set_settings(optimizer: torch.optim.Optimizer, changed: Settings) -> None:
    """Give the groups those that have changed."""
    for group, found in zip(optimizer.param_groups, changed, strict=True):
        for key, value in found.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = plain(value)  # a tuple, which JSON has made a list


# ---- the state ----


@dataclass(frozen=True)
class Entry:
    """What an optimizer keeps of a parameter under one key, without the numbers of a
    tensor."""

    number: int
    """Of the parameter."""
    key: str
    dtype: str | None
    """None for a plain number."""
    shape: list[int] | None
    """None for what is sent as a number."""
    is_divided: bool
    """Whether it is in parts as the parameter is."""
    value: float | int | bool | None
    tensor: torch.Tensor | None = field(default=None, compare=False)

    def words(self) -> list[Any]:
        return [
            *(self.number, self.key, self.dtype),
            *(self.shape, self.is_divided, self.value),
        ]

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, (self.dtype or "").removeprefix("torch."))
        assert isinstance(found, torch.dtype)
        return found

    def plain_value(self) -> Any:
        """What is sent as a number, as it was."""
        if self.dtype is None:
            return self.value
        return torch.tensor(self.value, dtype=self.torch_dtype)


def entries_of(
    state: Mapping[int, Mapping[str, Any]], parameters: Sequence[torch.Tensor]
) -> list[Entry]:
    """All that it holds; UnsupportedLoopError for what is neither tensor nor number."""
    found = []
    for number, values in state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                is_divided = value.shape == parameters[number].shape
                shape = list(value.shape)
                dtype = str(value.dtype)
                found.append(Entry(number, key, dtype, shape, is_divided, None, value))
            elif isinstance(value, torch.Tensor):
                found.append(
                    Entry(number, key, str(value.dtype), None, False, value.item())
                )
            elif isinstance(value, bool | int | float):
                found.append(Entry(number, key, None, None, False, value))
            elif value is not None:
                raise UnsupportedLoopError(
                    f"the optimizer keeps {key}, {type(value).__name__}, of a "
                    "parameter, and only tensors and numbers go between a server and "
                    "its workers; use ddp"
                )
    return found
