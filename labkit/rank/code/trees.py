"""The syntax tree of a cell's text, and what its nodes are called."""

import ast
import bisect
import functools
import re
from collections.abc import Iterator

VIEWS = {"to", "cuda", "cpu", "float", "long", "view", "reshape", "flatten", "squeeze"}
"""Methods whose result has the samples of the tensor."""

COPIES = {"detach", "clone", "item", "data", "sum", "mean"}

MARK = "# labkit: of an earlier cell, "
"""Before each function of an earlier cell that a cell uses, after the cell."""

BEGINS = re.compile(rf"^{MARK}(\w+)$", re.MULTILINE)


class Line(int):
    """A line of such a function, which a message is to name."""

    text: str

    def __new__(cls, number: int, name: str, begins: int) -> "Line":
        line = super().__new__(cls, number)
        line.text = f"{number - begins} of {name}"
        return line

    def __str__(self) -> str:
        return self.text


@functools.lru_cache(maxsize=1)
def tree_of(code: str) -> ast.Module:
    """The same as `new_tree_of`, for all that look at a cell and change nothing."""
    return new_tree_of(code)


def new_tree_of(code: str) -> ast.Module:
    """The syntax tree of a cell; an empty one of a cell that is no Python, which says
    so itself. Lines of functions of earlier cells after it know whose they are."""
    tree = parsed(code)
    begins = {
        code.count("\n", 0, found.start()) + 1: found[1]
        for found in BEGINS.finditer(code)
    }
    lines = sorted(begins)
    for node in ast.walk(tree) if begins else ():
        number = getattr(node, "lineno", 0)
        if place := bisect.bisect_left(lines, number):
            before = lines[place - 1]
            node.lineno = Line(number, begins[before], before)  # type: ignore[attr-defined]
    return tree


def parsed(code: str) -> ast.Module:
    """The syntax tree of a text; an empty one of what is no Python."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def line_of(node: ast.stmt | ast.expr) -> str:
    """The first line of it, with its number, as "line 12: queue.append(keys)"."""
    return f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"


def name_of(function: ast.expr) -> str:
    """The last name of what is called; "" where it has none."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def prepared_names(tree: ast.AST, place: int) -> set[str]:
    """The variables at this place in `model, optimizer, loader = prepare(...)`."""
    return {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "prepare"
        and isinstance(target := node.targets[0], ast.Tuple | ast.List)
        and len(target.elts) == 3  # another `prepare` may return something else
        and isinstance(name := target.elts[place], ast.Name)
    }


def takes_batches(loop: ast.For | ast.While, loaders: set[str]) -> bool:
    """Whether a loop goes over a loader, or asks one for its next batch."""
    if isinstance(loop, ast.For) and names_in(loop.iter, loaders):
        return True
    return any(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") == "next"
        for statement in loop.body
        for node in ast.walk(statement)
    )


def trains_on_each(loop: ast.For | ast.While) -> bool:
    """Whether it goes over something, by whatever name, as a class Trainer has its
    loader, with a backward pass for each of what there is."""
    if not isinstance(loop, ast.For) or ast.unparse(loop.iter).startswith("range("):
        return False
    within = [each for statement in loop.body for each in ast.walk(statement)]
    return has_backward(loop.body) and not any(
        isinstance(each, ast.For | ast.While) and has_backward(each.body)
        for each in within
    )


def has_backward(body: list[ast.stmt]) -> bool:
    return any(
        isinstance(each, ast.Call) and getattr(each.func, "attr", "") == "backward"
        for statement in body
        for each in ast.walk(statement)
    )


def names_in(node: ast.AST, names: set[str]) -> bool:
    return any(
        isinstance(each, ast.Name) and each.id in names for each in ast.walk(node)
    )


def number_in(loop: ast.For) -> set[str]:
    """The name that `enumerate` gives the number of a batch, if the loop has it."""
    is_tuple = isinstance(loop.target, ast.Tuple)
    if "enumerate(" in ast.unparse(loop.iter) and is_tuple:
        first = next(ast.iter_child_nodes(loop.target))
        return {getattr(first, "id", "")}
    return set()


def named_in(node: ast.AST) -> Iterator[str]:
    """The variables in an expression, and the attributes of `self`."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id != "self":
            yield each.id
        elif isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
            yield f"self.{each.attr}"


def names_stored(target: ast.expr) -> list[str]:
    """The plain names among what an assignment sets."""
    return [
        each.id
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]
