"""Tensors in what a model returns, also within objects that are no containers."""

import copy
from typing import Any

import torch

from labkit.compat.torch import tree_flatten
from labkit.compat.torch import tree_map
from labkit.compat.torch import tree_unflatten


def flatten(structure: Any) -> tuple[list[Any], Any]:
    """The leaves of a structure, and what `unflatten` needs beside them."""
    objects: list[Any] = []

    def opened(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) or not has_tensors(leaf):
            return leaf
        objects.append(leaf)
        return {f"object {len(objects) - 1}": contents(leaf)}

    leaves, spec = tree_flatten(tree_map(opened, structure))
    return leaves, (spec, objects)


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The structure with these leaves."""
    spec, objects = spec
    found = tree_unflatten(leaves, spec)
    if not objects:
        return found

    count = 0

    def is_opened(node: Any) -> bool:
        return isinstance(node, dict) and [*node][:1] == [f"object {count}"]

    def closed(node: Any) -> Any:
        nonlocal count
        if not is_opened(node):
            return node
        (values,) = node.values()
        found = copy.copy(objects[count])
        count += 1
        if isinstance(found, dict):
            found.update(values["items"])
        vars(found).update(values["attributes"])
        return found

    return tree_map(closed, found, is_leaf=is_opened)


def contents(value: Any) -> dict[str, Any]:
    """The attributes of an object and, if it is a dict of a kind, its items."""
    items = dict(value) if isinstance(value, dict) else {}
    return {"items": items, "attributes": dict(vars(value))}


def has_tensors(value: Any) -> bool:
    """Whether an object that is no container has tensors, as a dataclass may."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    found = contents(value)
    return any(
        isinstance(each, torch.Tensor)
        for values in found.values()
        for each in values.values()
    )
