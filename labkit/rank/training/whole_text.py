"""The text of a cell, with that of the functions of earlier cells which it uses."""

import ast
import functools
import inspect
import linecache
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from types import FunctionType
from types import MethodType
from typing import Any

from labkit.rank.loop.loop_body import MARK
from labkit.rank.loop.loop_body import parsed

DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def with_functions(
    code: str, names: Mapping[str, Any], is_ours: Callable[[str], bool]
) -> str:
    """`code`, followed by the functions and classes of `names` that it uses, and that
    these use, as far as their files are ours.

    What the cell itself defines by such a name is in its text.
    """
    parts: list[tuple[str, str]] = []
    seen = {node.name for node in parsed(code).body if isinstance(node, DEFINITIONS)}
    waiting: list[tuple[str, Mapping[str, Any]]] = [(code, names)]
    for text, known in waiting:
        for name in loaded_in(text):
            if name in seen or name not in known:
                continue
            seen.add(name)
            for function in functions_of(known[name]):
                found = definition_of(function, is_ours)
                if found is not None and found not in parts:
                    parts.append(found)
                    around = function.__globals__ | closure_of(function)
                    waiting.append((found[1], around))
    return "\n".join([code, *(f"{MARK}{name}\n{text}" for name, text in parts)])


def loaded_in(code: str) -> Iterator[str]:
    """The names that it reads."""
    for node in ast.walk(parsed(code)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


def functions_of(value: Any) -> list[FunctionType]:
    """`value` itself, what it wraps, or the methods of its class."""
    while issubclass(type(value), functools.partial | MethodType):
        value = value.func if type(value) is not MethodType else value.__func__
    kind = value if issubclass(type(value), type) else type(value)
    found = [value] if kind is FunctionType else [*vars(kind).values()]
    return [each for each in map(unwrapped, found) if type(each) is FunctionType]


def unwrapped(value: Any) -> Any:
    """What `functools.wraps` has wrapped; other objects are not asked."""
    return inspect.unwrap(value) if type(value) is FunctionType else value


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The variables of functions around it that it uses."""
    found = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return found


def definition_of(
    function: FunctionType, is_ours: Callable[[str], bool]
) -> tuple[str, str] | None:
    """Name and text of the outermost function or class that has `function` in it; None
    where its file is not ours, or not known."""
    file, line = function.__code__.co_filename, function.__code__.co_firstlineno
    if not is_ours(file):
        return None
    for node, text in definitions_in("".join(linecache.getlines(file))):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        if first <= line <= (node.end_lineno or first):
            return node.name, text
    return None


@functools.lru_cache(maxsize=8)
def definitions_in(text: str) -> list[tuple[Any, str]]:
    """A file's outermost functions and classes, each with its text."""
    return [
        (node, ast.get_source_segment(text, node) or "")
        for node in parsed(text).body
        if isinstance(node, DEFINITIONS)
    ]
