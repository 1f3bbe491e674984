"""Which statements of earlier cells a run needs."""

import ast
from collections.abc import Sequence

from labkit.notebook.export.cells import Statement
from labkit.notebook.export.names import ALWAYS_THERE
from labkit.notebook.export.names import changes_of


def needed(
    statements: Sequence[Statement],
    names: frozenset[str],
    own: frozenset[str] = frozenset(),
) -> tuple[list[Statement], frozenset[str]]:
    """Those that make the values which `names` have at the end, in order; and the names
    that none of them makes. `own` the run binds itself, before it calls anything."""
    modules = frozenset().union(
        *(each.names.binds for each in statements if each.is_import)
    )
    wanted = names
    while True:
        found, missing = _made_by(statements, wanted, modules)
        # What a function reads it finds when it is called: at the end, that is.
        later = frozenset().union(*(each.names.needs_later for each in found)) - own
        if later <= wanted:
            return _without_idle_seeds(found), missing - ALWAYS_THERE
        wanted |= later


def _made_by(
    statements: Sequence[Statement], names: frozenset[str], modules: frozenset[str]
) -> tuple[list[Statement], frozenset[str]]:
    wanted = set(names)
    found = []
    for each in reversed(statements):
        binds = each.names.binds & wanted
        # What a run has changed is its own: the caller says so.
        changes = not each.is_training and changes_of(each.node, modules) & wanted
        if binds or changes:
            found.append(each)
            if each.binds_anew:
                wanted -= each.names.binds
            wanted |= each.reads
    return found[::-1], frozenset(wanted)


def _without_idle_seeds(found: list[Statement]) -> list[Statement]:
    """Without seeds after which nothing is drawn: a run begins with its own."""
    kept: list[Statement] = []
    draws = False
    for each in reversed(found):
        if _is_seed(each.node) and not draws:
            continue
        draws = not _is_seed(each.node) and (draws or not each.is_constant)
        kept.append(each)
    return kept[::-1]


def _is_seed(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return "seed" in name
    return False
