"""Reads in a loop's text where it trains with the size of its batch, which is a
part."""

import ast
from collections.abc import Iterator

from labkit.rank.code.carried import used_names
from labkit.rank.code.exchanges import EXCHANGES
from labkit.rank.code.exchanges import has_exchanges
from labkit.rank.code.exchanges import quotients
from labkit.rank.code.loop_body import LEAVING
from labkit.rank.code.loop_body import NO_SCHEDULER
from labkit.rank.code.trees import VIEWS
from labkit.rank.code.trees import line_of
from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import named_in
from labkit.rank.code.trees import names_in
from labkit.rank.code.trees import names_stored
from labkit.rank.code.trees import number_in
from labkit.rank.code.trees import prepared_names
from labkit.rank.code.trees import tree_of

OPTIONS = {"lr", "weight_decay", "momentum", "betas", "eps"}
"""Of an optimizer, which a loop may set."""

METERS = {"add", "append", "update", "print", "write", "set_postfix", "extend", "range"}
"""What a call that gets the size of a batch may be, which is no update."""


def use_of_batch_size(code: str) -> str | None:
    """The first line of a loop over batches that makes the size of its batch a part of
    what it trains with, as "line 12: if seen > 1000:"; None if there is none, or if the
    cell exchanges anything between ranks.

    That are the loss that it multiplies, gradients, an optimizer's option, the argument
    of a scheduler's step, and a condition on which it ends or skips a batch; or a sum
    of sizes, by which it does anything else than to show it.
    """
    tree = tree_of(code)
    if has_exchanges(code, [*EXCHANGES, "reduction="]):
        return None
    loaders = prepared_names(tree, -1)
    # Of a mean over this rank's samples, which its own number is right for.
    divided = (each for node in ast.walk(tree) for each in quotients(node))
    divisors = {name for _, divisor in divided for name in named_in(divisor)}
    for loop in ast.walk(tree):
        if not (isinstance(loop, ast.For) and names_in(loop.iter, loaders)):
            continue
        if ".backward(" not in ast.unparse(loop):
            continue
        sizes = _Sizes(loop)
        found = sizes.first_use() or sizes.count(used_names(tree) - divisors)
        if found is not None:
            return line_of(found)
    return None


def update_by_batch_size(code: str) -> str | None:
    """The first line of a loop with a backward pass that calls something with the size
    of its batch, as "line 12: updater(x.shape[0])", and is no meter; None if there is
    none, or if the cell exchanges anything between ranks."""
    tree = tree_of(code)
    if has_exchanges(code, EXCHANGES):
        return None
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and ".backward(" in ast.unparse(loop):
            for found in _Sizes(loop).calls():
                return line_of(found)
    return None


class _Sizes:
    """What a loop over batches makes of their sizes."""

    def __init__(self, loop: ast.For) -> None:
        self._batches = {
            node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)
        } - number_in(loop)
        self._sizes: set[str] = set()
        """Names of numbers that are computed from sizes alone, and constants."""
        self._nodes = [node for part in loop.body for node in ast.walk(part)]
        ends = [
            call.func.value
            for call in self._nodes
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "backward"
        ]
        self._losses = {
            each.id
            for end in ends
            for each in ast.walk(end)
            if isinstance(each, ast.Name)
        }
        for _ in range(3):  # a name may be used above the line that sets it
            for node in self._nodes:
                self._follow(node)

    def _follow(self, node: ast.AST) -> None:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            if self._is_size(node.value):
                self._sizes.add(node.target.id)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            names = names_stored(node.targets[0])
            if self._is_of_batch(node.value):
                self._batches.update(names)
            elif self._is_size(node.value):
                self._sizes |= {*names} - self._losses

    def _is_of_batch(self, node: ast.AST) -> bool:
        """Whether it is the batch, or a part of each of its samples."""
        while True:
            if isinstance(node, ast.Subscript | ast.Attribute):
                if isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim"):
                    return False
                node = node.value
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in VIEWS
            ):
                node = node.func.value
            else:
                return isinstance(node, ast.Name) and node.id in self._batches

    def _is_size(self, node: ast.AST) -> bool:
        """Whether it is a number that is computed from the size of a batch."""
        if isinstance(node, ast.Name):
            return node.id in self._sizes
        if isinstance(node, ast.BinOp):
            both = node.left, node.right
            rest = [each for each in both if not self._is_size(each)]
            return len(rest) < 2 and all(map(self._is_plain, rest))
        if isinstance(node, ast.Subscript):  # x.shape[0]
            of = node.value
            is_first = isinstance(node.slice, ast.Constant) and node.slice.value == 0
            is_shape = isinstance(of, ast.Attribute) and of.attr == "shape"
            return is_first and is_shape and self._is_of_batch(of.value)  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            return False
        name = name_of(node.func)
        if name in ("len", "min", "max", "int", "float", "tensor"):
            return any(
                self._is_size(each) or (name == "len" and self._is_of_batch(each))
                for each in node.args
            )
        is_whole = not node.args or ast.unparse(node.args[0]) == "0"
        is_asked = isinstance(node.func, ast.Attribute) and name in ("size", "numel")
        return is_asked and is_whole and self._is_of_batch(node.func.value)  # type: ignore[attr-defined]

    def _is_plain(self, node: ast.AST) -> bool:
        """Whether it is a number that is computed from constants and other names."""
        kinds = ast.Constant | ast.Name | ast.BinOp | ast.operator | ast.Load
        return all(
            isinstance(each, kinds) and getattr(each, "id", "") not in self._losses
            for each in ast.walk(node)
        )

    def _has_size(self, node: ast.AST) -> bool:
        return any(map(self._is_size, ast.walk(node)))

    def _multiplies(self, node: ast.AST) -> bool:
        """Whether a size is a factor of it."""
        if not isinstance(node, ast.BinOp):
            return False
        factors = node.left, node.right
        if isinstance(node.op, ast.Mult) and any(map(self._is_size, factors)):
            return not all(map(self._is_size, factors))
        if isinstance(node.op, ast.Div):  # by a size, it is a mean
            return self._multiplies(node.left) and not self._is_size(node.right)
        return any(map(self._multiplies, factors))

    def first_use(self) -> ast.stmt | None:
        """The first statement that trains with a size."""
        for node in self._nodes:
            if isinstance(node, ast.stmt) and self._trains_with(node):
                return node
        return None

    def count(self, used: set[str]) -> ast.stmt | None:
        """The first statement that adds a size to one of these."""
        for node in self._nodes:
            if not isinstance(node, ast.AugAssign) or not self._is_size(node.value):
                continue
            if used & {*named_in(node.target)}:
                return node
        return None

    def calls(self) -> Iterator[ast.stmt]:
        """Statements that call something with a size, and may be updates."""
        for node in self._nodes:
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                continue
            name, of = name_of(node.value.func), ast.unparse(node.value.func)
            is_meter = name in METERS or bool(NO_SCHEDULER.search(of))
            if not is_meter and any(map(self._is_size, node.value.args)):
                yield node

    def _trains_with(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.If | ast.While):
            return self._has_size(node.test) and any(
                isinstance(each, LEAVING)
                for part in node.body
                for each in ast.walk(part)
            )
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in self._losses:
                is_product = isinstance(node, ast.AugAssign) and isinstance(
                    node.op, ast.Mult
                )
                return self._multiplies(node.value) or (
                    is_product and self._is_size(node.value)
                )
            is_option = (
                isinstance(target, ast.Subscript)
                and isinstance(target.slice, ast.Constant)
                and target.slice.value in OPTIONS
            )
            is_gradient = "grad" in ast.unparse(target)
            return (is_option or is_gradient) and self._has_size(node.value)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call, function = node.value, node.value.func
            if not isinstance(function, ast.Attribute):
                return False
            if function.attr == "backward":
                return self._multiplies(function.value) or any(
                    map(self._has_size, call.args)
                )
            of = ast.unparse(function.value)
            is_gradient = "grad" in of and function.attr in ("mul_", "div_")
            is_scheduler = function.attr == "step" and not NO_SCHEDULER.search(of)
            return (is_scheduler or is_gradient) and any(map(self._has_size, call.args))
        return False
