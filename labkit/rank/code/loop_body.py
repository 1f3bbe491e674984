"""Reads in a loop's text what it does for every batch besides a step, which is K times
a step with `--accumulate K`."""

import ast
import re
from collections.abc import Iterator

from labkit.rank.code.trees import has_backward
from labkit.rank.code.trees import line_of
from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import names_in
from labkit.rank.code.trees import prepared_names
from labkit.rank.code.trees import takes_batches
from labkit.rank.code.trees import trains_on_each
from labkit.rank.code.trees import tree_of

PLAIN_CALLS = {
    *("zero_grad", "backward", "step", "train", "eval", "log", "requires_grad_"),
    *("clip_grad_norm_", "clip_grad_value_", "item"),
    *("breakpoint", "set_trace", "input"),
    *("print", "write", "set_description", "set_postfix", "set_postfix_str", "update"),
}
"""What a call in a loop's body may do as often as there are microbatches."""

LEAVING = ast.Break | ast.Continue

NO_SCHEDULER = re.compile(r"bar|progress|tqdm|count|meter|writer|log", re.IGNORECASE)
"""In the name of what is no scheduler."""

METER = re.compile(rf"{NO_SCHEDULER.pattern}|metric|acc|loss|stat|time", re.IGNORECASE)
"""In the name of what `update` adds numbers to."""

AVERAGE = re.compile(
    "ema|average|avg|swa|shadow|teacher|target|bank|queue|memory|buffer", re.IGNORECASE
)
"""In the name of what `update` changes that the loop trains with."""


def extra_work(code: str) -> str | None:
    """The first line of a loop over batches that does more than compute a loss and
    take a step, as "line 12: ema.update_parameters(model)"; None if there is none."""
    tree = tree_of(code)
    loaders = prepared_names(tree, -1)
    models = prepared_names(tree, 0)
    evaluating = {
        id(inner)
        for node in ast.walk(tree)
        if evaluates(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in evaluating:
            continue
        if not isinstance(node, ast.For | ast.While):
            continue
        goes_over = isinstance(node, ast.For) and names_in(node.iter, loaders)
        is_trained_in = trains_on_each(node)
        if takes_batches(node, loaders) or is_trained_in:
            head = ast.unparse(node).splitlines()[0]
            is_cut = (goes_over and "zip(" in head) or "islice(" in head
            is_counted = is_cut or not (goes_over or is_trained_in)
            found = node if is_counted else next(unusual(node.body, models), None)
            if found is not None:
                return line_of(found)
    return None


def evaluates(node: ast.AST) -> bool:
    """Whether it is a function, or a block, in which no gradients are recorded."""
    heads: list[ast.expr] = []
    if isinstance(node, ast.FunctionDef):
        heads = node.decorator_list
    elif isinstance(node, ast.With):
        heads = [each.context_expr for each in node.items]
    words = ("no_grad", "inference_mode")
    return any(word in ast.unparse(each) for each in heads for word in words)


def is_meter(update: ast.Call, models: set[str]) -> bool:
    """Whether `update` counts or shows numbers, and makes no average of weights."""
    of = ast.unparse(update.func).rpartition(".")[0]
    given = [*update.args, *(each.value for each in update.keywords)]
    if METER.search(of):
        return True
    has_model = any(names_in(each, models) for each in given)
    return bool(given) and not has_model and not AVERAGE.search(of)


def unusual(body: list[ast.stmt], models: set[str]) -> Iterator[ast.stmt]:
    """Statements that do more than compute values for this batch."""
    for statement in body:
        is_loop = isinstance(statement, ast.For | ast.While)
        is_one = isinstance(statement, ast.If) and is_phase(statement)
        may_step = is_loop or (isinstance(statement, ast.If) and not is_one)
        if may_step and ".step(" in ast.unparse(statement):
            yield statement  # it accumulates by itself, or steps several times
        elif isinstance(statement, ast.For | ast.While):
            inner = unusual([*statement.body, *statement.orelse], models)
            yield from (each for each in inner if not isinstance(each, LEAVING))
        elif isinstance(statement, ast.If):
            yield from unusual([*statement.body, *statement.orelse], models)
        elif isinstance(statement, ast.With) and "no_grad" not in ast.unparse(
            statement
        ):
            yield from unusual(statement.body, models)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            name = name_of(statement.value.func)
            is_by_batch = name == "step" and any(
                not isinstance(each, ast.Name | ast.Lambda)  # no closure
                for each in statement.value.args
            )
            is_other = name == "update" and not is_meter(statement.value, models)
            if name not in PLAIN_CALLS or is_by_batch or is_other:
                yield statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = getattr(statement, "targets", None) or [statement.target]  # type: ignore[union-attr]
            if not all(map(is_variable, targets)):
                yield statement
        elif not isinstance(statement, ast.Pass | ast.Expr | ast.Assert):
            yield statement


def is_phase(statement: ast.If) -> bool:
    """Whether it has all of a training step, for epochs that train."""
    return "train" in ast.unparse(statement.test) and has_backward(statement.body)


def is_variable(target: ast.expr) -> bool:
    """Whether this is set in the loop, or in the class that has it, and in nothing that
    they train with; or comes to the same however often it is set."""
    if isinstance(target, ast.Attribute):
        return ast.unparse(target.value) == "self" or target.attr == "requires_grad"
    return isinstance(target, ast.Name | ast.Tuple | ast.List)
