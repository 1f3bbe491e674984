"""Reads in a cell's text what it exchanges between ranks."""

import ast
import re
from collections.abc import Iterable
from collections.abc import Iterator

from labkit.rank.code.trees import BEGINS
from labkit.rank.code.trees import COPIES
from labkit.rank.code.trees import VIEWS
from labkit.rank.code.trees import line_of
from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import tree_of

RANK_COUNTS = {"world_size", "get_world_size", "WORLD_SIZE", "num_ranks"}

EXCHANGES = ("all_reduce", "all_gather", ".share", "num_samples")
"""Words of a loop that knows that its batch is a part."""

_TRAINS = re.compile(r"\b(prepare|backward)\(")


def has_exchanges(code: str, words: Iterable[str]) -> bool:
    """Whether a cell knows that its batch is a part, as these words show in it or in
    what it uses that prepares or trains. Of the rest, as a data set or a loss function,
    only what exchanges something between ranks."""
    cell, *others = BEGINS.split(code)
    texts = [cell, *(each for each in others[1::2] if _TRAINS.search(each))]
    return any(word in text for text in texts for word in words) or any(
        word in code for word in ("all_reduce", "all_gather")
    )


def sum_over_all(code: str) -> str | None:
    """The first line that sums or gathers over all ranks, as "line 12:
    dist.all_reduce(count)"; None if there is none.

    Not one of which a mean is made: what it sums is divided by the number of ranks, or
    by another such sum.
    """
    tree = tree_of(code)
    found = [(node, call) for node, call in _reductions(tree) if is_sum(call)]
    of = {id(call): words_in(call.args[0]) for _, call in found}
    summed = set().union(*of.values())
    means: set[str] = set()
    for node in ast.walk(tree):
        for value, divisor in quotients(node):
            both = words_in(value), words_in(divisor)
            if both[0] & summed and both[1] & (summed | RANK_COUNTS):
                means |= both[0] | both[1]
    for node, call in found:
        if not of[id(call)] & means:
            return line_of(node)
    return None


def _reductions(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """The statements that sum something over ranks, or gather it, each with the
    call."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr | ast.Assign):
            continue
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and each.args:
                name = name_of(each.func)
                if name == "all_reduce" or name.startswith("all_gather"):
                    yield node, each


def is_sum(call: ast.Call) -> bool:
    """Whether an all-reduce sums, over the ranks of the default group; or a gathering
    is over these."""
    is_reduce = "all_reduce" in ast.unparse(call.func)
    names = ["tensor", "op" if is_reduce else "from", "group"]
    given = dict(zip(names, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords if each.arg}
    op = ast.unparse(given["op"]) if "op" in given else "SUM"
    group = ast.unparse(given["group"]) if "group" in given else "None"
    return op.endswith("SUM") and group in ("None", "dist.group.WORLD")


def quotients(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a node divides, and by what."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
        yield node.left, node.right
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        yield node.target, node.value
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("div", "div_", "true_divide")
        and node.args
    ):
        yield node.func.value, node.args[0]


def words_in(node: ast.AST) -> set[str]:
    """The names and attributes in an expression that may stand for a value of its."""
    return {
        getattr(each, "id", getattr(each, "attr", ""))
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
    } - {"torch", "dist", "distributed", "self", "tensor", "device", *VIEWS, *COPIES}
