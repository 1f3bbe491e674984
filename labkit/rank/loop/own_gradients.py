"""Finds where a cell computes with gradients that are its rank's own."""

import ast

CLIPPING = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "get_total_norm"}
"""Functions that read the gradients of parameters."""
HARMLESS = {"zero_", "detach_", "requires_grad_"}
"""Methods that only clear a gradient."""
OTHER_GRADS = {"autograd", "func"}
"""What has a function `grad`."""


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
