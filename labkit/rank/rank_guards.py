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


def lonely_use(code: str) -> str | None:
    """The first line within `if rank == 0:` or the like that uses a model which
    `prepare` gave, as "line 12: evaluate(model)"; None if there is none.

    Functions of the cell that use such a model are followed.
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
        and any(uses(call, models, set()) for call in calls(node.body))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and is_about_rank(node.test):
            for call in calls(node.body):
                if uses(call, models, users):
                    return f"line {call.lineno}: {ast.unparse(call)}"
    return None


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


def calls(body: list[ast.stmt]) -> Iterator[ast.Call]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                yield node


def uses(call: ast.Call, models: set[str], users: set[str]) -> bool:
    """Whether a call is of a model, or is given one, or is of one of `users`."""
    name = name_of(call.func)
    if name in users:
        return True
    if name in HARMLESS:
        return False
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    return any(
        isinstance(each, ast.Name) and each.id in models for each in (owner, *call.args)
    )


def name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
