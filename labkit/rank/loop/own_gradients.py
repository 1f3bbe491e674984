"""Finds where a cell computes with gradients that are its rank's own."""

import ast
import re

CLIPPING = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "get_total_norm"}
"""Functions that read the gradients of parameters."""
HARMLESS = {"zero_", "detach_", "requires_grad_"}
"""Methods that only clear a gradient."""
OTHER_GRADS = {"autograd", "func"}
"""What has a function `grad`."""
OF_GROUPS = re.compile(r"(?<!\bself)\.param_groups\b")
"""Of an optimizer, but for what a class of optimizers says of itself."""


def gradient_use(code: str) -> str | None:
    """The first line that reads `parameter.grad`, as "line 12: norm = p.grad.norm()";
    None where it is only cleared, or asked whether it is there."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # which the cell itself will say
        return None
    parents = {
        id(child): node
        for node in ast.walk(tree)
        for child in ast.iter_child_nodes(node)
    }
    lines = code.splitlines()
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Call) and reads(node, parents)
    ]
    return f"line {min(found)}: {lines[min(found) - 1].strip()}" if found else None


def group_gradient_use(code: str) -> str | None:
    """The first line that reads gradients of what an optimizer's groups hold, as
    "line 12: clip_grad_norm_(optimizer.param_groups[0]['params'], 1.0)"; None if there
    is none."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    nodes = [*ast.walk(tree)]
    parents = {
        id(child): node for node in nodes for child in ast.iter_child_nodes(node)
    }
    lists = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and is_of_groups(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in nodes:
        if isinstance(node, ast.For):
            is_theirs = is_of_groups(node.iter, lists) or (
                OF_GROUPS.search(text(node.iter)) and "['params']" in text(node)
            )
            inside = (each for part in node.body for each in ast.walk(part))
            if is_theirs and any(
                isinstance(each, ast.Attribute | ast.Call) and reads(each, parents)
                for each in inside
            ):
                found.append(node.lineno)
        elif (
            isinstance(node, ast.Call)
            and reads(node, parents)
            and any(is_of_groups(each, lists) for each in node.args)
        ):
            found.append(node.lineno)
    lines = code.splitlines()
    return f"line {min(found)}: {lines[min(found) - 1].strip()}" if found else None


def is_of_groups(node: ast.expr, lists: set[str]) -> bool:
    """Whether it is a list of parameters from an optimizer's groups."""
    if isinstance(node, ast.Name):
        return node.id in lists
    found = text(node)
    return "['params']" in found and bool(OF_GROUPS.search(found))


def text(node: ast.AST) -> str:
    return ast.unparse(node)


def reads(node: ast.Attribute | ast.Call, parents: dict[int, ast.AST]) -> bool:
    """Whether it computes with a gradient."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return name in CLIPPING
    if node.attr != "grad" or not isinstance(node.ctx, ast.Load):
        return False
    owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
    around = parents[id(node)]
    is_cleared = isinstance(around, ast.Attribute) and around.attr in HARMLESS
    is_asked = isinstance(around, ast.Compare) and all(
        isinstance(each, ast.Constant) and each.value is None
        for each in around.comparators
    )
    return owner not in OTHER_GRADS and not (is_cleared or is_asked)
