"""Tensors in what a model returns, also within objects that are no containers."""

import copy
import functools
import operator
from collections import OrderedDict
from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import fields
from dataclasses import is_dataclass
from typing import Any
from typing import TypeVar
from typing import cast

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import tree_flatten
from labkit.compat.torch import tree_leaves
from labkit.compat.torch import tree_map
from labkit.compat.torch import tree_unflatten
from labkit.compat.torch import tuple_like

MAX_DEPTH = 3
"""Of objects within objects."""
MAX_LENGTH = 100
"""Of a list or a dict that is looked into: a vocabulary is none of tensors."""
CONTAINERS = list | tuple | dict
_OBJECT = "labkit object "

GIVEN_TWICE = (
    "a layer or a block gets the same {kind} as two arguments, or in two places, and "
    "changes it. It receives two copies here, so only one would change. Pass it once, "
    "or use ddp"
)

IN_ITSELF = (
    "the model, or a block of it, is given or returns a list or a dict that contains "
    "itself, so its tensors cannot be found. Use a list or a dict that does not; or "
    "leave out --activation-checkpointing, and use ddp"
)

Search = TypeVar("Search", bound=Callable[..., Any])

Places = list[tuple[int, int]]
"""Of what a module is given, and of the same in what it returns, as `holders_in` lists
them."""


def ending(search: Search) -> Search:
    """Have a search of a structure say so where that has no end."""

    @functools.wraps(search)
    def searched(*args: Any, **kwargs: Any) -> Any:
        try:
            return search(*args, **kwargs)
        except RecursionError:
            raise UnsupportedLoopError(IN_ITSELF) from None

    return cast("Search", searched)


@ending
def flatten(structure: Any) -> tuple[list[Any], Any]:
    """The leaves of a structure, and what `unflatten` needs beside them."""
    leaves, spec = tree_flatten(structure)
    if not any(map(has_tensors, leaves)):
        return leaves, (spec, [])
    objects: list[Any] = []

    def opened(leaf: Any, depth: int = MAX_DEPTH) -> Any:
        if not has_tensors(leaf, depth):
            return leaf
        if not any(each is leaf for each in objects):
            objects.append(leaf)
        number = next(n for n, each in enumerate(objects) if each is leaf)
        key = f"{_OBJECT}{number}"
        return {
            key: {
                kind: {name: opened(each, depth - 1) for name, each in values.items()}
                for kind, values in contents(leaf).items()
            }
        }

    leaves, spec = tree_flatten(tree_map(opened, structure))
    return leaves, (spec, objects)


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The structure with these leaves; its objects are copies, one of each."""
    spec, objects = spec
    made: dict[str, Any] = {}
    found = tree_unflatten(leaves, spec)
    if not objects:
        return found

    def is_opened(node: Any) -> bool:
        return isinstance(node, dict) and str(*[*node][:1]).startswith(_OBJECT)

    def closed(node: Any) -> Any:
        if not is_opened(node):
            return node
        [(key, values)] = node.items()
        if key in made:
            return made[key]
        values = tree_map(closed, values, is_leaf=is_opened)
        found = copy.copy(objects[int(key.removeprefix(_OBJECT))])
        made[key] = found
        if isinstance(found, dict):
            set_items(found, values["items"])
        elif isinstance(found, list):
            found[:] = values["items"].values()
        set_attributes(found, values["attributes"])
        return found

    return tree_map(closed, found, is_leaf=is_opened)


def contents(value: Any) -> dict[str, Any]:
    """The attributes of an object and, of a dict or a list of a kind, its items."""
    items = dict(enumerate(value)) if isinstance(value, list) else {}
    if isinstance(value, dict):
        items = dict(value)
    slots = [name for kind in type(value).__mro__ for name in slots_of(kind)]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {"items": items, "attributes": attributes | getattr(value, "__dict__", {})}


def set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """In place, also of a dataclass that is frozen."""
    for name, each in attributes.items():
        if name in getattr(value, "__dict__", ()):
            vars(value)[name] = each
        else:  # a slot
            object.__setattr__(value, name, each)


def map_attributes(function: Callable[[Any], Any], value: Any) -> None:
    """Put `function(each)` in the place of each attribute of an object."""
    found = contents(value)["attributes"]
    set_attributes(value, {name: function(each) for name, each in found.items()})


def slots_of(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    # Python puts the class's name before names that begin with two.
    return tuple(
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name
        for name in names
        if not name.endswith("__")
    )


def has_tensors(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether an object that is none of torch's containers has tensors, as a dataclass
    or a dict of one's own may: in its attributes and items, in short lists and dicts
    there, and in objects that are attributes. Objects in a list are not looked into, as
    those of a cache of keys and values."""
    if (
        depth == 0
        or is_long(value)
        or isinstance(value, torch.Tensor | nn.Module | type)
    ):
        return False
    if not is_opaque(value):
        return False
    found = (x for values in contents(value).values() for x in values.values())
    return any(
        isinstance(leaf, torch.Tensor)
        or (leaf is each and has_tensors(leaf, depth - 1))
        for each in found
        if not is_long(each)
        for leaf in tree_leaves(each)
    )


def is_long(value: Any) -> bool:
    return isinstance(value, CONTAINERS) and len(value) > MAX_LENGTH


@ending
def replaced(structure: Any, change: Callable[[Any], Any]) -> Any:
    """A structure with `change(tensor)` in the place of each tensor in its lists,
    tuples, dicts and dataclasses; one in which all are the same is no copy."""
    known: dict[int, Any] = {}

    def visited(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if type(value) is tuple:  # mostly: it cannot contain itself
            items = [visited(each) for each in value]
            return value if all(map(operator.is_, items, value)) else tuple(items)
        if isinstance(value, CONTAINERS):
            if not value:  # mostly, of what is given by keyword
                return value
        elif isinstance(value, type) or not is_dataclass(value):
            return value
        if id(value) not in known:
            known[id(value)] = value, visited_inside(value)
        return known[id(value)][1]

    def visited_inside(value: Any) -> Any:
        found: dict[Any, Any]
        if isinstance(value, dict):
            found = dict(value)
        elif isinstance(value, list | tuple):
            found = dict(enumerate(value))
        else:
            names = (each.name for each in fields(value))
            found = {n: getattr(value, n) for n in names if hasattr(value, n)}
        now = {key: visited(each) for key, each in found.items()}
        if all(now[key] is each for key, each in found.items()):
            return value
        if isinstance(value, tuple):
            return tuple_like(value, [*now.values()])
        made = copy.copy(value)
        if isinstance(value, dict):
            set_items(made, now)
        elif isinstance(value, list):
            made[:] = now.values()
        else:
            set_attributes(made, now)
        return made

    return visited(structure)


class Given:
    """What a module is given, before it runs: the lists, dicts and objects in it."""

    def __init__(
        self, args: Any, kwargs: Any, own: Sequence[Any] | None = None
    ) -> None:
        """`own` are the caller's, as far as these are no copies; if it is None they
        all are."""
        self.holders = holders_of(args, kwargs)
        around = {*map(id, holders_of(args, kwargs, depth=0))}
        self._watched = [
            (each, flatten(each)[0], num_leaves(each))
            for n, each in enumerate(self.holders)
            if own is None
            or own[n] is not each
            or (id(each) in around and not isinstance(each, _SHARED))
        ]
        self._are_copies = own is None

    def has_changed(self, output: Any) -> bool:
        """Whether the module has put something into any of them: so it hands on what it
        has computed. What it returns itself does not count, nor an attribute that was
        not there before and has no gradient, as it may be a cache."""
        returned = {id(each) for each in holders_in(output)}
        return any(
            num_leaves(each) > count or is_computed(leaves, flatten(each)[0])
            for each, leaves, count in self._watched
            if id(each) not in returned or (isinstance(each, set) and self._are_copies)
        )

    def returned_in(self, output: Any) -> Places:
        """Which of them the module returns, changed or not."""
        places = {id(each): n for n, each in enumerate(holders_in(output))}
        keys = enumerate(map(id, self.holders))
        return [(n, places[key]) for n, key in keys if key in places]


_SHARED = deque | set
"""What `fully_shard` mostly hands on as it is."""


def may_hold(args: Any, kwargs: Any) -> bool:
    """Whether there may be lists, dicts or objects in what a module is given: quick to
    see of the most."""
    given = (*args, *kwargs.values())
    return bool([each for each in given if not isinstance(each, _PLAIN)])


_PLAIN = torch.Tensor | int | float | str | None
"""What a module cannot put anything into; into a tensor it could write, which autograd
sees."""


def num_leaves(structure: Any) -> int:
    return len(structure) if isinstance(structure, set) else len(tree_leaves(structure))


@ending
def holders_of(args: Any, kwargs: Any, depth: int = MAX_DEPTH) -> list[Any]:
    """Those of a call, in the order of its arguments."""
    return holders_in((args, tuple(kwargs.values())), depth)


def holders_in(structure: Any, depth: int = MAX_DEPTH) -> list[Any]:
    """The lists, dicts and objects in a structure, into which a module can put what it
    has computed; with a depth also those within dataclasses and other objects with
    tensors, but for objects in lists there."""
    if isinstance(structure, tuple):
        return [found for each in structure for found in holders_in(each, depth)]
    if isinstance(structure, list | dict | deque):
        if is_long(structure):
            return [structure]
        each_one = structure.values() if isinstance(structure, dict) else structure
        inner = (found for each in each_one for found in holders_in(each, depth))
        return [structure, *inner]
    if isinstance(structure, set):
        return [structure]
    if isinstance(structure, torch.Tensor | nn.Module | type):
        return []
    if not is_opaque(structure):
        return []
    within: list[Any] = []
    if is_dataclass(structure):  # of which `fully_shard` copies what is in its fields
        within = [getattr(structure, each.name, None) for each in fields(structure)]
    elif has_tensors(structure, depth):
        within = [*contents(structure)["attributes"].values()]
    found = [
        each
        for value in (within if depth else ())
        for each in holders_in(value, depth - 1 if is_opaque(value) else 0)
    ]
    return [structure, *found]


def hand_back(pairs: Iterable[tuple[Any, Any]], output: Any) -> Any:
    """What a module returns, with the caller's own lists, dicts and objects in the
    place of the copies that the module was given: pairs of the two. They hold then what
    the module has put into the copies."""
    own = {id(copied): (mine, copied) for mine, copied in pairs if mine is not copied}
    if not own:
        return output
    check_once(own.values())

    def back(node: Any) -> Any:
        if id(node) in own:
            return own[id(node)][0]
        if isinstance(node, tuple):
            found = [*map(back, node)]
            if any(map(operator.is_not, found, node)):
                return tuple_like(node, found)
        return node

    returned = [each for each in holders_in(output) if id(each) not in own]
    for mine, copied in own.values():
        refill(mine, copied, back)
    for each in returned:  # what the module has made around them
        refill(each, each, back)
    return back(output)


def check_once(pairs: Iterable[tuple[Any, Any]]) -> None:
    """UnsupportedLoopError where a module has changed one of two copies that it was
    given of one list or dict."""
    first: dict[int, Any] = {}
    for mine, copied in pairs:
        if not isinstance(mine, list | dict | deque):
            continue
        other = first.setdefault(id(mine), copied)
        if other is not copied and {len(mine)} != {len(other), len(copied)}:
            raise UnsupportedLoopError(GIVEN_TWICE.format(kind=type(mine).__name__))


def refill(value: Any, other: Any, back: Callable[[Any], Any]) -> None:
    """Have a list, a dict or an object hold `back` of what another of its kind does."""
    if isinstance(value, list | deque | set):
        found = [*map(back, other)]
        is_same = len(found) == len(value) and all(map(operator.is_, found, value))
        if not is_same:
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(found)
    elif isinstance(value, dict):
        set_items(value, {key: back(each) for key, each in other.items()})
    before, after = contents(value)["attributes"], contents(other)["attributes"]
    now = {name: back(each) for name, each in after.items()}
    changed = [name for name in now if before.get(name, before) is not now[name]]
    set_attributes(value, {name: now[name] for name in changed})
    for name in before.keys() - now.keys():
        object.__delattr__(value, name)


def add_attributes(value: Any, other: Any) -> None:
    """Those which another object has and this has not, as a cache."""
    if value is not other:
        known = contents(value)["attributes"]
        found = contents(other)["attributes"]
        set_attributes(value, {n: x for n, x in found.items() if n not in known})


def set_items(value: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Not by a dict's own methods: it may refuse them, as transformers' ModelOutput."""
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    for key in value.keys() - items.keys():
        kind.__delitem__(value, key)
    for key, each in items.items():
        if key not in value or value[key] is not each:
            kind.__setitem__(value, key, each)


def is_opaque(value: Any) -> bool:
    """Whether it has attributes of its own."""
    return hasattr(value, "__dict__") or hasattr(value, "__slots__")


def is_computed(before: Iterable[Any], now: Iterable[Any]) -> bool:
    """Whether any of the leaves of a structure is gone, or a new one has a gradient."""
    old, new = ({id(each): each for each in leaves} for leaves in (before, now))
    return not old.keys() <= new.keys() or any(
        isinstance(each, torch.Tensor) and each.requires_grad
        for key, each in new.items()
        if key not in old
    )
