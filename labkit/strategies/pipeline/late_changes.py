"""Refuses forward passes that begin to change the model's state after the first batch:
of a batch in microbatches each would change it."""

import contextlib
from collections import deque
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import buffers_of
from labkit.compat.torch import num_changes
from labkit.strategies.own_state import contents_of
from labkit.strategies.own_state import is_another
from labkit.strategies.own_state import is_other
from labkit.strategies.relay.flags import is_of_torch

BEGINS_TO_CHANGE = (
    "forward changes the model's {name} in this batch, and did not in the first one of "
    "its kind: under pipeline it runs once for each microbatch, so each of {times} has "
    "changed it. Change it in the loop, once a step or an epoch, or use ddp; or have "
    "forward change it from the first batch on, so that batches pass as one microbatch"
)
MOST_ITEMS = 100
"""Of a container that is looked at in every batch; a vocabulary has more."""
_CONTAINERS = (list, dict, set, deque)
_OF_EVERY_MODULE = vars(nn.Module()).keys()


class LateChanges:
    """Numbers, tensors and containers that modules of the user's own classes have had
    before the first batch, as attributes or buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{prefix}.{name}".lstrip("."), names, name)
            for prefix, module in model.named_modules()
            if not is_of_torch(module)
            for names in (vars(module), buffers_of(module))
            for name, value in names.items()
            if _is_watched(name, value)
        ]

    @contextlib.contextmanager
    def refused(self, times: int) -> Iterator[Callable[[], None]]:
        """The model runs `times` times within it: UnsupportedLoopError if it changes
        any. It gives what is to be called after the first time: sizes, and tables of
        them, that it alone has changed are those of all the others, too."""
        before = self._held()
        after_first = [*before]

        def first_is_done() -> None:
            after_first[:] = self._held()

        yield first_is_done
        for (name, *_), old, once, now in zip(
            self._places, before, after_first, self._held(), strict=True
        ):
            with DisableTorchFunctionSubclass():
                is_late = _has_changed(old, now) and (
                    not _is_of_sizes(old, now) or _has_changed(once, now)
                )
            if is_late:
                raise UnsupportedLoopError(
                    BEGINS_TO_CHANGE.format(name=name, times=times)
                )

    def _held(self) -> list[tuple[Any, Any]]:
        """What is there, with what tells whether it is changed in place."""
        with DisableTorchFunctionSubclass():
            held = [names.get(key) for _, names, key in self._places]
            return [(value, _inside(value)) for value in held]


def _is_watched(name: str, value: Any) -> bool:
    if name in _OF_EVERY_MODULE or isinstance(value, bool | nn.Parameter):
        return False
    if isinstance(value, _CONTAINERS):
        return len(value) <= MOST_ITEMS
    return isinstance(value, int | float | torch.Tensor)


def _inside(value: Any) -> Any:
    """What tells whether it is changed in place."""
    if isinstance(value, torch.Tensor):
        return num_changes(value)
    return contents_of(value) if isinstance(value, _CONTAINERS) else None


def _has_changed(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    (old, contents), (now, now_inside) = before, after
    if now is not old:
        return is_another(old, now)
    if isinstance(now, _CONTAINERS):
        return is_other(contents, now_inside)
    return isinstance(now, torch.Tensor) and now_inside != contents


def _is_of_sizes(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    """Whether it goes by the sizes of a batch, as a mask that is made again for another
    length, and is no mean of its values."""
    (old, contents), (now, now_inside) = before, after
    if isinstance(old, torch.Tensor) and isinstance(now, torch.Tensor):
        return old.shape != now.shape
    if isinstance(old, dict) and isinstance(now, dict):  # it has only grown
        return all(now_inside.get(key) is each for key, each in contents.items())
    if isinstance(old, _CONTAINERS) and isinstance(now, _CONTAINERS):
        return all(isinstance(each, int) for each in [*contents, *now_inside])
    return isinstance(old, int) and isinstance(now, int)
