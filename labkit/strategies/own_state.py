"""Sets back what a trial changes: what the loop's own code keeps, counts, draws from.

A model's forward pass and an optimizer's step are tried before the loop has them: what
is left of that would count in the loop.
"""

import argparse
import contextlib
import dis
import functools
import random
import sys
from collections import OrderedDict
from collections import UserDict
from collections import UserList
from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import CellType
from types import CodeType
from types import FunctionType
from types import MethodType
from types import SimpleNamespace
from typing import Any
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from labkit.compat.c10d import local_part
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import buffers_of
from labkit.compat.torch import is_functorch_wrapped
from labkit.compat.torch import num_changes
from labkit.compat.torch import tree_leaves
from labkit.compat.torch import without_cached_weights
from labkit.strategies.autograd.structures import slots_of
from labkit.strategies.relay.parameters import is_absent

LIBRARIES = sys.stdlib_module_names | {"deepspeed", "labkit", "numpy", "torch"}
"""Whose classes and functions are not searched."""
NUM_SEARCHED = 1000
"""Of the items of a list or a dict; however many they are, it is set back."""
MOST_ELEMENTS = 10_000_000
"""Of an array or a tensor that is set back, besides the model's own: data has more."""
GLOBAL: list[Any] = [
    random.getstate.__self__,  # type: ignore[attr-defined]
    np.random.get_state.__self__,  # type: ignore[attr-defined]
]
"""What the functions of `random` and `numpy.random` draw from."""


class OwnState:
    """What is reached from a model or a class, as it is now: attributes, the names that
    functions use, and lists, dicts, sets, tensors, arrays and generators of random
    numbers among these."""

    def __init__(
        self,
        root: Any,
        without: Iterable[Any] = (),
        spares: Callable[[Any], bool] = lambda name: False,
        besides: Iterable[Any] = (),
    ) -> None:
        """`without` what is reached by way of these, and what dicts and objects have
        under a name that this `spares`; with what is reached from others `besides`."""
        self._spares = spares
        besides = [*besides]
        modules = root.modules() if isinstance(root, nn.Module) else ()
        kinds = [root if isinstance(root, type) else type(root), *map(type, modules)]
        kinds += map(type, besides)
        names = {each.__module__ for kind in kinds for each in kind.__mro__}
        self._homes = {
            name for name in names if name.partition(".")[0] not in LIBRARIES
        } | {"__main__"}
        self._found: list[tuple[Any, Any]] = []
        self.has_iterators = False
        """Whether there are any, of which nothing can be set back."""
        seen = {id(each): each for each in without}
        is_whole = isinstance(root, nn.Module) and not seen
        tensors = [*tensors_of(root)] if is_whole else []
        self._tensors = {*map(id, tensors)}
        """The model's, of any size."""
        waiting = [root, *besides, *tensors, *GLOBAL]
        with DisableTorchFunctionSubclass():
            while waiting:
                each = waiting.pop()
                if id(each) in seen or not self._is_own(each):
                    continue
                seen[id(each)] = each
                self.has_iterators |= is_iterator(each)
                contents = self._contents_of(each)
                if contents is not None:
                    self._found.append((each, contents))
                waiting += inside(each, contents)

    def _is_own(self, value: Any) -> bool:
        """Whether this is the loop's, or may have something of the loop's in it."""
        if isinstance(value, type):
            # Or has been: `fully_shard` makes a class of each module's.
            return any(each.__module__ in self._homes for each in value.__mro__)
        if isinstance(value, FunctionType):
            is_own = value.__globals__.get("__name__") in self._homes
            return is_own or hasattr(value, "__wrapped__")
        if isinstance(value, torch.Tensor):
            return id(value) in self._tensors or value.numel() <= MOST_ELEMENTS
        if isinstance(value, np.ndarray):
            return value.size <= MOST_ELEMENTS
        home = str(type(value).__module__)
        is_own = home in self._homes or not is_installed(home)
        return is_own or isinstance(value, SEARCHED) or is_iterator(value)

    def has_changed(self) -> bool:
        """Whether anything has that was there before, or a number that was not."""
        with DisableTorchFunctionSubclass():
            return any(
                is_other(old, self._contents_of(each)) for each, old in self._found
            )

    def set_back(self) -> None:
        with DisableTorchFunctionSubclass(), torch.no_grad():
            for each, before in self._found:
                if not is_as_before(each, before):
                    set_contents(each, self._with_spared(each, before))

    def _contents_of(self, value: Any) -> Any:
        found = contents_of(value)
        if type(value) is not dict:
            return found
        return {name: each for name, each in found.items() if not self._spares(name)}

    def _with_spared(self, value: Any, before: Any) -> Any:
        if type(value) is not dict:
            return before
        return before | {name: v for name, v in value.items() if self._spares(name)}

    @property
    def objects(self) -> list[Any]:
        """What has contents, without the global generators of random numbers."""
        found = [each for each, _ in self._found]
        return [each for each in found if not any(each is one for one in GLOBAL)]


class Values(NamedTuple):
    """What is in a tensor: this rank's part of it."""

    kind: type
    data: torch.Tensor
    values: torch.Tensor
    num_changes: int
    """Also of those which change nothing so far, as of an average with itself."""


GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)
SEARCHED = (
    *(dict, list, tuple, deque, set, CellType, MethodType, partial, property),
    *(classmethod, staticmethod, nn.Module, *GENERATORS),
    *(SimpleNamespace, argparse.Namespace, UserDict, UserList),
)
"""Types of which anyone's may have something of the loop's in them."""


@functools.lru_cache(1024)
def is_installed(module: str) -> bool:
    """Whether it is of a library: an object of one may have threads that go on."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_library = module.partition(".")[0] in LIBRARIES
    return is_library or not {"site-packages", "dist-packages"}.isdisjoint(
        Path(file).parts
    )


def is_iterator(value: Any) -> bool:
    """Whether it is one of Python's, and no object that counts in an attribute."""
    is_pythons = type(value).__module__ in ("builtins", "itertools")
    return is_pythons and isinstance(value, Iterator)


def inside(value: Any, contents: Any) -> Iterable[Any]:
    """What is reached from `value`."""
    found: Iterable[Any]
    match value:
        case type():
            return (*vars(value).values(), *value.__bases__)
        case FunctionType():
            unwrapped = getattr(value, "__wrapped__", None)
            return (*contents.values(), *(value.__closure__ or ()), unwrapped)
        case MethodType():
            return value.__func__, value.__self__
        case classmethod() | staticmethod():
            return (value.__func__,)
        case property():
            return value.fget, value.fset
        case partial():
            return value.func, *value.args, *value.keywords.values()
        case CellType():
            return contents
        case torch.Tensor() if contents is None:
            return ()  # what it is here is not the loop's
        case dict():
            found = islice(contents.values(), NUM_SEARCHED)
        case tuple() | list() | deque() | set():
            found = islice(value, NUM_SEARCHED)
        case _:
            found = contents.values() if isinstance(contents, dict) else ()
    return type(value), getattr(value, "__dict__", None), *found


def contents_of(value: Any) -> Any:
    """What is in it, or what a generator draws next; None of all else."""
    match value:
        case type():
            return dict(vars(value))
        case FunctionType():
            names, known = names_of(value.__code__), value.__globals__
            return {name: known[name] for name in names if name in known}
        case CellType():
            try:
                return [value.cell_contents]
            except ValueError:  # it is empty so far
                return []
        case dict():
            # Not by its own methods: it may make what it gives, as transformers' table
            # of activations.
            kind = kind_of_dict(value)
            return {key: dict.__getitem__(value, key) for key in kind.__iter__(value)}
        case list() | deque() | set():
            return list(value)
        case torch.Tensor():
            if has_values(value):
                values = local_part(value.data).clone()
                return Values(type(value), value.data, values, num_changes(value))
            return None
        case np.ndarray():
            return value.copy() if value.flags.writeable else None
        case torch.Generator() | np.random.RandomState():
            return value.get_state()
        case np.random.Generator():
            return value.bit_generator.state
        case random.Random() if not isinstance(value, random.SystemRandom):
            return value.getstate()
    slots = [name for kind in type(value).__mro__ for name in slots_of(kind)]
    return {n: getattr(value, n) for n in slots if hasattr(value, n)} or None


def is_as_before(value: Any, before: Any) -> bool:
    """Whether the same values are in a list, a dict or a function's names; of all else
    it is not known."""
    if not isinstance(before, dict | list):
        return False
    now = contents_of(value) or type(before)()
    if isinstance(before, dict):
        same = [key in now and now[key] is each for key, each in before.items()]
        return len(now) == len(before) and all(same)
    same = [one is other for one, other in zip(now, before, strict=False)]
    return len(now) == len(before) and all(same)


def set_contents(value: Any, contents: Any) -> None:
    match value:
        case type():
            for name, each in dict(vars(value)).items():
                if name not in contents:
                    delattr(value, name)
                elif each is not contents[name]:
                    setattr(value, name, contents[name])
        case FunctionType():
            for name in contents_of(value).keys() - contents.keys():
                del value.__globals__[name]
            value.__globals__.update(contents)
        case CellType():
            if contents:
                value.cell_contents = contents[0]
        case dict():
            kind = kind_of_dict(value)
            kind.clear(value)
            for key, each in contents.items():
                kind.__setitem__(value, key, each)
        case set():
            value.clear()
            value.update(contents)
        case list() | deque():
            value.clear()
            value.extend(contents)
        case torch.Tensor():
            if type(value) is not contents.kind:
                value.__class__ = contents.kind
            if not torch.equal(local_part(contents.data), contents.values):
                local_part(contents.data).copy_(contents.values)
            value.data = contents.data
        case np.ndarray():
            value[...] = contents
        case torch.Generator() | np.random.RandomState():
            value.set_state(contents)
        case np.random.Generator():
            value.bit_generator.state = contents
        case random.Random():
            value.setstate(contents)
        case _:  # slots
            for name in (contents_of(value) or {}).keys() - contents.keys():
                object.__delattr__(value, name)
            for name, each in contents.items():
                object.__setattr__(value, name, each)


def kind_of_dict(value: dict[Any, Any]) -> Any:
    """What keeps its order."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def has_values(tensor: Any) -> bool:
    """Whether this rank has some of it, that can be set."""
    if tensor.is_meta or is_absent(tensor) or is_functorch_wrapped(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_inference()


@functools.lru_cache(1024)
def names_of(code: CodeType) -> set[str]:
    """The global names that a function uses, and those that are in it."""
    found = {
        each.argval
        for each in dis.get_instructions(code)
        if each.opname.endswith("_GLOBAL")
    }
    within = [names_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return found.union(*within)


def is_other(before: Any, now: Any) -> bool:
    """Whether contents have changed. What is new, or was None, is taken for something
    that is computed once, unless it is a number."""
    if isinstance(before, Values):
        is_here = isinstance(now, Values) and now.kind is before.kind
        return (
            not is_here
            or now.num_changes != before.num_changes
            or is_another(before.values, now.values)
        )
    if isinstance(before, dict):
        olds = {name: before.get(name) for name in {**before, **now}}
        return any(
            is_another(old, now.get(name))
            for name, old in olds.items()
            if old is not None or isinstance(now.get(name), int | float)
        )
    one, other = tree_leaves(before), tree_leaves(now)
    return len(one) != len(other) or any(map(is_another, one, other))


def is_another(one: Any, other: Any) -> bool:
    if one is other:
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_meta or other.is_meta:  # the rank that has it will tell
            return False
        return one.shape != other.shape or not torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return not np.array_equal(one, other)
    if isinstance(one, tuple):
        return not isinstance(other, tuple) or is_other(one, other)
    is_value = isinstance(one, int | float | str | bytes)
    return not is_value or type(one) is not type(other) or one != other


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[OwnState]:
    """Run `model` within it: what that changes is set back. It gives what tells whether
    anything has changed."""
    state = OwnState(model)
    try:
        with without_cached_weights():
            yield state
    finally:
        state.set_back()


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and attributes."""
    yield from model.parameters()
    for module in model.modules():
        for each in (*buffers_of(module).values(), *vars(module).values()):
            if isinstance(each, torch.Tensor):
                yield each
