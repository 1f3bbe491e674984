"""What a loop changes and no checkpoint has: in modules that `prepare` did not get,
beside the state of those that it got, and in variables."""

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from labkit.compat.torch import is_plain
from labkit.compat.torch import transient_buffers
from labkit.rank.code.carried import carried_names
from labkit.rank.code.carried import taken_beside
from labkit.strategies.model.fingerprints import fingerprints

LIBRARIES = ("labkit", "torch", "IPython", "ipykernel", "deepspeed")

NOT_SAVED = (
    "a checkpoint has parameters and persistent buffers of what prepare got, and not "
    "what the loop has changed in {names}: this run begins with that as the cell makes "
    "it, unlike one process that goes on. To have it saved, make it a part of the "
    "model that prepare gets: a module by model.average = "
    "average.requires_grad_(False), a number by model.register_buffer(name, "
    "torch.tensor(value))"
)
OTHER_VARIABLES = (
    "a checkpoint has no variables of the cell, and this run begins with others than "
    "the loop had after step {step}: {names}. To go on as one process would, begin a "
    "count of steps at loader.steps_taken, and number batches by "
    "enumerate(loader, loader.position.batch). Have other numbers saved, as a part of "
    "the model that prepare gets: model.register_buffer(name, torch.tensor(value))"
)

OTHER_LOADER = (
    "{line}: a checkpoint does not have where another DataLoader was, so this run has "
    "its batches from the beginning of a pass, in another order than one process that "
    "goes on. To have them go on, pass both datasets to prepare as one: "
    "torch.utils.data.StackDataset(a, b), or a dataset of your own that picks from both"
)


class Unsaved:
    """The modules that the loop has in variables, and what prepared models have beside
    their states: whether the loop changes that. Of other variables, the values."""

    def __init__(self, read_code: Callable[[], str]) -> None:
        """`read_code()` gives the text of the cell."""
        self._read_code = read_code
        self._seen: dict[str, tuple[weakref.ref[nn.Module], int]] = {}
        """By name, with what it was as it was first seen."""
        self._ours: set[int] = set()
        """Ids of the tensors of the prepared models."""
        self._beside: list[tuple[weakref.ref[nn.Module], dict[Any, Any]]] = []
        """Prepared models, and what they had beside their states as first seen."""
        self._cell: dict[str, Any] = {}
        """The variables of the cell."""
        self._values: dict[str, str] = {}
        """What others had by which the loop goes on, as they were seen last."""
        self._awaited: dict[str, str] = {}
        """What those had that the loop did not have yet where it is to go on."""

    def look(self, prepared: Iterable[nn.Module]) -> None:
        """Note those of the loop that calls."""
        prepared = list(prepared)
        known = [reference() for reference, _ in self._beside]
        for model in prepared:
            if all(each is not model for each in known):
                self._beside.append((weakref.ref(model), beside_state(model)))
        self._ours = {id(tensor) for each in prepared for tensor in tensors_of(each)}
        for name, module in modules_in(sys._getframe(1)):
            if name not in self._seen and self._others(module):
                with contextlib.suppress(RuntimeError):
                    before = fingerprint(self._others(module))
                    self._seen[name] = weakref.ref(module), before

    def changed(self) -> list[str]:
        """The names of those that are not what they were."""
        found = []
        for name, (reference, before) in self._seen.items():
            module = reference()
            with contextlib.suppress(RuntimeError):
                if module is not None and fingerprint(self._others(module)) != before:
                    found.append(name)
        for reference, values in self._beside:
            if (model := reference()) is not None:
                now = beside_state(model)
                found += [
                    f"the model's {name}"
                    for (name, shape), value in values.items()
                    if now.get((name, shape), value) != value
                ]
        return found

    def variables(self) -> dict[str, str]:
        """What there is in the variables by which the loop goes on: the one that calls,
        or the last that did."""
        carried = carried_names(self._read_code())
        for name in carried.changed | carried.numbers | carried.rounds:
            if said := self._said_of(name, sys._getframe(1)):
                self._values[name] = said
        return self._values

    def others_than(self, saved: Mapping[str, str], *, is_within: bool) -> list[str]:
        """What of that is not as it was, where the loop that calls is to go on;
        `is_within` a pass through its data."""
        carried = carried_names(self._read_code())
        found = []
        self._awaited = {}
        for name, before in saved.items():
            now = None
            if name in carried.rounds or (name in carried.numbers and is_within):
                now = "0"
            elif name in carried.changed:
                if name not in carried.late:  # or it may be of a cell before
                    now = self._said_of(name, sys._getframe(1))
                if now is None:
                    self._awaited[name] = before
            found += other_than(name, now, before)
        return found

    def set_since(self) -> list[str]:
        """What of that the loop has set since then, otherwise than it was: a loop that
        takes a batch before it begins sets more before it asks for the next."""
        awaited, self._awaited = self._awaited, {}
        return [
            said
            for name, before in awaited.items()
            for said in other_than(name, self._said_of(name, sys._getframe(1)), before)
        ]

    def taken_beside(self) -> str | None:
        """The first line that takes batches of another loader."""
        return taken_beside(self._read_code())

    def _said_of(self, name: str, frame: FrameType | None) -> str | None:
        """What a variable has, of the user's functions that are under way, or of the
        cell; None where there is none, or it is no number, tensor or list."""
        name, _, attribute = name.partition(".")
        places = []
        while frame is not None and owner_of(frame) != "IPython":
            if is_users(frame):
                places.append(frame.f_locals)
                if owner_of(frame) == "__main__":
                    self._cell = frame.f_globals
            frame = frame.f_back
        place = next((each for each in places if name in each), self._cell)
        with contextlib.suppress(Exception):  # of a property, or another class's own
            value = place.get(name)
            return described(getattr(value, attribute) if attribute else value)
        return None

    def _others(self, module: nn.Module) -> list[torch.Tensor]:
        """What it has beside the prepared models: a loss may have one in it."""
        return [each for each in tensors_of(module) if id(each) not in self._ours]


def other_than(name: str, now: str | None, before: str) -> list[str]:
    if now in (None, before):
        return []
    is_short = len(f"{now}{before}") < 50
    return [f"{name} is {now} (was {before})" if is_short else name]


def described(value: Any) -> str | None:
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple | dict | set | deque):
        return f"of length {len(value)}"
    if not isinstance(value, torch.Tensor) or not is_plain(value) or value.is_meta:
        return None
    return f"tensor {fingerprint([value]) % 2**32:08x}" if value.numel() else None


def owner_of(frame: FrameType) -> str:
    """The package whose code it runs."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def is_users(frame: FrameType) -> bool:
    """Whether it runs the cell, or a function of the user's."""
    return owner_of(frame) not in LIBRARIES


def modules_in(frame: FrameType | None) -> Iterator[tuple[str, nn.Module]]:
    """Those in variables of the user's functions that are under way, and of the cell;
    and in attributes of objects of the user's classes."""
    while frame is not None:
        if is_users(frame):
            for name, value in list(frame.f_locals.items()):
                if name.startswith("_"):
                    continue
                if issubclass(type(value), nn.Module):
                    yield name, value
                elif type(value).__module__ == "__main__":
                    inner: dict[str, Any] = getattr(value, "__dict__", {})
                    for key, each in list(inner.items()):
                        if issubclass(type(each), nn.Module):
                            yield f"{name}.{key}", each
        frame = frame.f_back


def beside_state(model: nn.Module) -> dict[tuple[str, tuple[int, ...]], Any]:
    """Numbers in attributes and buffers that are not persistent, of modules of the
    user's classes in `model`, by name and shape: a buffer that grows is a cache."""
    found: dict[tuple[str, tuple[int, ...]], Any] = {}
    for path, module in model.named_modules():
        if not any(kind.__module__ == "__main__" for kind in type(module).__mro__):
            continue
        place = f"{path}." if path else ""
        for name, value in vars(module).items():
            is_own = not name.startswith("_") and name != "training"
            if is_own and type(value) in (bool, int, float):
                found[place + name, ()] = repr(value)
        for name, buffer in transient_buffers(module).items():
            if is_plain(buffer) and not buffer.is_meta and buffer.numel():
                found[place + name, tuple(buffer.shape)] = fingerprint([buffer])
    return found


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Those that are whole here: to look at what ranks have parts of may be collective,
    and another rank may have no such module."""
    found = [*module.parameters(), *module.buffers()]
    return [t for t in found if is_plain(t) and not t.is_meta and t.numel()]


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    return hash(tuple(int(fingerprints([each.detach()])) for each in tensors))
