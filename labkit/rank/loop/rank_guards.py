"""Finds what a cell has one rank do alone with a model that no rank has whole."""

import ast
from collections.abc import Iterator

RANK_NAMES = {"rank", "local_rank", "global_rank", "RANK", "LOCAL_RANK", "is_main"}
RANK_CALLS = {"get_rank", "is_main_process", "is_rank_0"}
HARMLESS = {
    *("print", "type", "repr", "str", "id", "isinstance", "len", "hasattr"),
    *("train", "eval", "modules", "named_modules", "children", "named_children"),
}
"""Functions, and methods of a model, that need no parameter's values."""


def lonely_use(code: str, *, gradients_alone: bool = False) -> str | None:
    """The first line within `if rank == 0:` or the like that uses a model which
    `prepare` gave, as "line 12: evaluate(model)"; None if there is none.

    Functions of the cell that use such a model are followed. With `gradients_alone`
    only what mentions `grad` or `backward` counts: the strategy has parameters whole.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError:  # which the cell itself will say
        return None
    models = {name for node in ast.walk(tree) for name in prepared_names(node)}
    users = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(uses(each, models, set()) for each in node.body)
    }
    for node in ast.walk(tree):
        for part in parts_of_some_ranks(node):
            if uses(part, models, users) and not (
                gradients_alone and not mentions_gradients(part)
            ):
                first = ast.unparse(part).splitlines()[0]
                return f"line {part.lineno}: {first}"
    return None


def parts_of_some_ranks(node: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """What of a statement or expression runs on some ranks alone."""
    if isinstance(node, ast.If) and is_about_rank(node.test):
        yield from node.body
        yield from node.orelse
    elif isinstance(node, ast.IfExp) and is_about_rank(node.test):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.BoolOp) and is_about_rank(node.values[0]):
        yield from node.values[1:]


def mentions_gradients(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Attribute) and each.attr in ("grad", "backward")
        for each in ast.walk(node)
    )


def prepared_names(node: ast.AST) -> Iterator[str]:
    """The variable for the model in `model, optimizer, loader = prepare(...)`."""
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and name_of(node.value.func) == "prepare"
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.targets[0].elts[0], ast.Name)
    ):
        yield node.targets[0].elts[0].id


def is_about_rank(test: ast.expr) -> bool:
    """Whether a condition may hold on some ranks alone."""
    for node in ast.walk(test):
        if isinstance(node, ast.Name) and node.id in RANK_NAMES:
            return True
        if isinstance(node, ast.Call) and name_of(node.func) in RANK_CALLS:
            return True
    return False


def uses(node: ast.AST, models: set[str], users: set[str]) -> bool:
    """Whether something in it needs the values of one of `models`: calls it, is given
    it, or reads what it is made of; or calls one of `users`."""
    if isinstance(node, ast.Call):
        if name_of(node.func) in users:
            return True
        if name_of(node.func) in HARMLESS:
            return any(
                uses(each, models, users)
                for each in node.args
                if not isinstance(each, ast.Name)
            )
    if isinstance(node, ast.Name):
        return node.id in models
    return any(uses(each, models, users) for each in ast.iter_child_nodes(node))


def name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
