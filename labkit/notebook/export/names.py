"""The names that code binds, needs and changes."""

import ast
import builtins
import re
import symtable
from collections.abc import Iterator
from collections.abc import Sequence
from collections.abc import Set
from dataclasses import dataclass

ALWAYS_THERE = frozenset({*dir(builtins), "__file__"})
_SETTERS = re.compile(
    r"set_\w+|(\w+_)?seed(_all)?|use_\w+|enable\w*|register\w*|append"
)
"""Functions of a module that are called for what they change."""


@dataclass(frozen=True)
class Names:
    """The global names of a piece of code."""

    binds: frozenset[str]
    """What it assigns, imports or defines."""
    needs: frozenset[str]
    """What it reads as it runs; it may have bound that itself."""
    needs_later: frozenset[str]
    """What its functions read, once they are called."""
    sets: frozenset[str]
    """What its functions assign, by `global`."""

    @property
    def all_needs(self) -> frozenset[str]:
        return self.needs | self.needs_later


def names_of(code: str) -> Names:
    """The names of code as it would run in a module; SyntaxError where it cannot."""
    top = symtable.symtable(code, "<cell>", "exec")
    binds: set[str] = set()
    needs: set[str] = set()
    later: set[str] = set()
    sets: set[str] = set()
    for symbol in top.get_symbols():
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
            binds.add(symbol.get_name())
        if symbol.is_referenced():
            needs.add(symbol.get_name())
    for table, runs_now in _inner(top, True):
        for symbol in table.get_symbols():
            if not symbol.is_global():
                continue
            if symbol.is_referenced():
                (needs if runs_now else later).add(symbol.get_name())
            if symbol.is_assigned():
                (binds if runs_now else sets).add(symbol.get_name())
    return Names(*map(frozenset, (binds, needs, later, sets)))


def _inner(
    table: symtable.SymbolTable, runs_now: bool
) -> Iterator[tuple[symtable.SymbolTable, bool]]:
    """The tables within one, and whether their code runs where it stands: that of
    classes and comprehensions does."""
    for child in table.get_children():
        is_function = child.get_type() == "function" and not (
            child.get_name().endswith("comp") or child.get_name() == "genexpr"
        )
        now = runs_now and not is_function
        yield child, now
        yield from _inner(child, now)


def root_of(node: ast.AST) -> str | None:
    """The name that `a.b[c].d(e)` begins with."""
    while True:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case ast.Starred(value=inner) | ast.Call(func=inner):
                node = inner
            case _:
                return None


def changes_of(statement: ast.stmt, modules: frozenset[str]) -> frozenset[str]:
    """Names whose values a statement may change in place: `a.b = c`, `a[b] = c`,
    `a.append(b)`, `initialize(a)`. Of `modules` alone what their setters set."""
    found: set[str | None] = set()
    for node in _outside_functions(statement):
        match node:
            case (
                ast.Attribute(ctx=ast.Store() | ast.Del())
                | ast.Subscript(ctx=ast.Store() | ast.Del())
            ):
                found.add(root_of(node))
            case ast.Expr(value=ast.Call(func=function, args=args, keywords=keywords)):
                root = root_of(function)
                if root in ALWAYS_THERE:
                    continue
                name = function.attr if isinstance(function, ast.Attribute) else ""
                if root not in modules or _SETTERS.fullmatch(name):
                    found.add(root if name else None)
                given = [*args, *(each.value for each in keywords)]
                found |= {root_of(each) for each in given} - modules
    return frozenset(name for name in found if name is not None)


def related(statements: Sequence[ast.stmt], names: Set[str]) -> frozenset[str]:
    """Other names for the values of `names`, or for what may be a part of them or have
    them as a part."""
    found = set(names)
    own = [names_of(ast.unparse(node)) for node in statements]
    made: set[str] = set()
    called: set[str] = set()  # what calls make: a number is no part of anything
    for node, each in zip(statements, own, strict=True):
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            made |= each.binds
            if any(isinstance(inner, ast.Call) for inner in ast.walk(node)):
                called |= each.binds
    while True:
        before = len(found)
        for node, each in zip(statements, own, strict=True):
            is_made = isinstance(node, ast.Assign | ast.AnnAssign)
            if each.binds & found and is_made:
                found |= each.needs & called
            if each.all_needs & found and not _prints(node):
                found |= each.binds
                if not is_made:  # as a loop that appends to a list
                    found |= each.needs & made
        if len(found) == before:
            return frozenset(found - names)


def _prints(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id="print"))):
            return True
    return False


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _outside_functions(child)
