"""Finds what a loop does for every batch besides a step: with `--accumulate K` it does
that K times a step."""

import ast
from collections.abc import Iterator

PLAIN_CALLS = {
    *("zero_grad", "backward", "step", "train", "eval", "log", "requires_grad_"),
    *("clip_grad_norm_", "clip_grad_value_", "item"),
    *("print", "write", "set_description", "set_postfix", "set_postfix_str", "update"),
}
"""What a call in a loop's body may do as often as there are microbatches."""

LEAVING = ast.Break | ast.Continue


def extra_work(code: str) -> str | None:
    """The first line of a loop over batches that does more than compute a loss and
    take a step, as "line 12: ema.update_parameters(model)"; None if there is none."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # which the cell itself will say
        return None
    loaders = {name for node in ast.walk(tree) for name in loader_names(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While) and takes_batches(node, loaders):
            goes_over = isinstance(node, ast.For) and names_in(node.iter, loaders)
            is_zipped = goes_over and "zip(" in ast.unparse(node).splitlines()[0]
            is_counted = is_zipped or not goes_over
            found = node if is_counted else next(unusual(node.body), None)
            if found is not None:
                first = ast.unparse(found).splitlines()[0]
                return f"line {found.lineno}: {first}"
    return None


def loader_names(node: ast.AST) -> Iterator[str]:
    """The variable for the loader in `model, optimizer, loader = prepare(...)`."""
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "prepare"
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.targets[0].elts[-1], ast.Name)
    ):
        yield node.targets[0].elts[-1].id


def takes_batches(loop: ast.For | ast.While, loaders: set[str]) -> bool:
    """Whether a loop goes over a loader, or asks one for its next batch."""
    if isinstance(loop, ast.For) and names_in(loop.iter, loaders):
        return True
    return any(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") == "next"
        for statement in loop.body
        for node in ast.walk(statement)
    )


def names_in(node: ast.AST, names: set[str]) -> bool:
    return any(
        isinstance(each, ast.Name) and each.id in names for each in ast.walk(node)
    )


def unusual(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that do more than compute values for this batch."""
    for statement in body:
        is_loop = isinstance(statement, ast.For | ast.While)
        if (is_loop or isinstance(statement, ast.If)) and ".step(" in ast.unparse(
            statement
        ):
            yield statement  # it accumulates by itself, or steps several times
        elif isinstance(statement, ast.For | ast.While):
            inner = unusual([*statement.body, *statement.orelse])
            yield from (each for each in inner if not isinstance(each, LEAVING))
        elif isinstance(statement, ast.If):
            yield from unusual([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.With) and "no_grad" not in ast.unparse(
            statement
        ):
            yield from unusual(statement.body)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            is_by_batch = name == "step" and any(
                not isinstance(each, ast.Name | ast.Lambda)  # no closure
                for each in statement.value.args
            )
            if name not in PLAIN_CALLS or is_by_batch:
                yield statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = getattr(statement, "targets", None) or [statement.target]  # type: ignore[union-attr]
            if not all(isinstance(each, ast.Name | ast.Tuple) for each in targets):
                yield statement
        elif not isinstance(statement, ast.Pass | ast.Expr | ast.Assert):
            yield statement
