"""The text of a cell, with that of the functions that it uses of earlier cells and of
the user's own modules."""

import ast
import functools
import inspect
import linecache
import symtable
import sysconfig
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from types import MethodType
from types import ModuleType
from typing import Any

from labkit.rank.code.trees import MARK
from labkit.rank.code.trees import parsed

LIBRARIES = [
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
]
MAX_CHARACTERS = 60_000
"""Of what a cell uses: to read so much takes a second or two on each rank."""
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def with_functions(
    code: str, names: Mapping[str, Any], is_ours: Callable[[str], bool]
) -> str:
    """`code`, followed by the functions and classes of `names` that it uses, and that
    these use, as far as their files are ours: as `names.function`, too, of a module.

    What the cell itself defines by such a name is in its text.
    """
    parts: dict[str, str] = {}
    num_characters = 0
    own = {node.name for node in parsed(code).body if isinstance(node, DEFINITIONS)}
    waiting = [(code, {name: names[name] for name in names.keys() - own})]
    seen: set[int] = set()
    for text, known in waiting:
        for name in loaded_in(text):
            first, _, rest = name.partition(".")
            value = value_of(known.get(first), rest)
            if id(value) in seen:
                continue
            seen.add(id(value))
            for function in functions_of(value):
                name, found = definition_of(function, is_ours)
                if found in parts or found in code:
                    continue
                if num_characters + len(found) > MAX_CHARACTERS:
                    continue
                num_characters += len(found)
                parts[found] = name
                waiting.append((found, function.__globals__ | closure_of(function)))
    return "\n".join([code, *(f"{MARK}{name}\n{text}" for text, name in parts.items())])


def loaded_in(code: str) -> Iterator[str]:
    """The global names that it reads: `a`, or `a.b` of what may be a module."""
    try:
        known = globals_of(symtable.symtable(code, "<cell>", "exec"))
    except (SyntaxError, ValueError):  # which it says itself
        return
    for node in ast.walk(parsed(code)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in known:
                yield name
            case ast.Attribute(ctx=ast.Load()):
                name = dotted(node)
                if name.partition(".")[0] in known:
                    yield name


def dotted(node: ast.expr) -> str:
    """`a.b.c`, as it is written; "" of an attribute of what is no name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *names[::-1]]) if isinstance(node, ast.Name) else ""


def globals_of(table: symtable.SymbolTable) -> set[str]:
    """The names in a text, without those of variables of its functions."""
    is_top = table.get_type() == "module"
    found = {s.get_name() for s in table.get_symbols() if is_top or s.is_global()}
    return found.union(*map(globals_of, table.get_children()))


def value_of(value: Any, rest: str) -> Any:
    """`value.rest` of a module; of another value that itself."""
    while rest and type(value) is ModuleType:
        name, _, rest = rest.partition(".")
        value = vars(value).get(name)
    return value


@functools.lru_cache(1024)
def is_own_file(file: str) -> bool:
    """Whether it is a module of the user's, and no library."""
    return Path(file).suffix == ".py" and not is_of_library(file)


def is_of_library(file: str) -> bool:
    path = Path(file)
    return any(path.is_relative_to(folder) for folder in LIBRARIES) or bool(
        {"site-packages", "dist-packages"} & {*path.parts}
    )


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
) -> tuple[str, str]:
    """Name and text of the outermost function or class that has `function` in it; empty
    where its file is not ours, or not known."""
    file, line = function.__code__.co_filename, function.__code__.co_firstlineno
    if not is_ours(file):
        return "", ""
    linecache.checkcache(file)
    for node, text in definitions_in("".join(linecache.getlines(file))):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        if first <= line <= (node.end_lineno or first):
            return node.name, text
    return "", ""


@functools.lru_cache(maxsize=64)
def definitions_in(text: str) -> list[tuple[Any, str]]:
    """A file's outermost functions and classes, each with its text."""
    lines = text.split("\n")  # `ast.get_source_segment` does so for each
    return [
        (node, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
        for node in parsed(text).body
        if isinstance(node, DEFINITIONS)
    ]
