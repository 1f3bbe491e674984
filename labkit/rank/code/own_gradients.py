"""Finds where a cell computes with gradients that are its rank's own."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import new_tree_of
from labkit.rank.code.trees import tree_of

CLIPPING = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "get_total_norm"}
"""Functions that read the gradients of parameters."""
HARMLESS = {"zero_", "detach_", "requires_grad_"}
"""Methods that only clear a gradient."""
ASKED = {
    *("device", "dim", "dtype", "grad", "is_leaf", "ndim", "numel", "requires_grad"),
    *("shape", "size"),
}
"""What may be asked of a parameter's part."""
ASKING = {"append", "extend", "id", "isinstance", "len", "print", "repr", "str", "type"}
"""Functions that use no values of what they are given."""
OTHER_GRADS = {"autograd", "func"}
"""What has a function `grad`."""


def gradient_use(code: str) -> str | None:
    """The first line that reads `parameter.grad`, as "line 12: norm = p.grad.norm()";
    None where it is only cleared, or asked whether it is there."""
    tree = tree_of(code)
    parents = parents_in(tree)
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Call) and reads(node, parents)
    ]
    return first_line(code, found)


def group_gradient_use(code: str) -> str | None:
    """The first line that reads gradients of what an optimizer's groups hold, as
    "line 12: clip_grad_norm_(optimizer.param_groups[0]['params'], 1.0)"; None if there
    is none."""
    return first_line(code, [*GroupUse(new_tree_of(code)).lines()])


def group_value_use(code: str) -> str | None:
    """The first line after `prepare` that uses or sets what an optimizer's groups hold,
    or looks whether something is in them: of a parameter, not of its gradient."""
    return first_line(code, [*GroupUse(new_tree_of(code)).value_lines()])


def step_value_use(code: str) -> str | None:
    """The first line that uses what `optimizer.step()` returns; None without one."""
    tree = tree_of(code)
    parents = parents_in(tree)
    names = {
        getattr(target.elts[1], "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and prepares(node)
        for target in node.targets
        if isinstance(target, ast.Tuple) and len(target.elts) > 1
    }
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and root_of(node.func.value) in names
        and not (node.args or node.keywords)
        and not isinstance(parents[id(node)], ast.Expr | ast.Lambda)
    ]
    return first_line(code, found)


def first_line(code: str, numbers: list[int]) -> str | None:
    """The first of these lines, with its number; None without any."""
    if not numbers:
        return None
    number = min(numbers)
    return f"line {number}: {code.splitlines()[number - 1].strip()}"


def parents_in(tree: ast.AST) -> dict[int, Any]:
    """The parent of each node, by the node's id."""
    return {
        id(child): node
        for node in ast.walk(tree)
        for child in ast.iter_child_nodes(node)
    }


class GroupUse:
    """Where a cell reads gradients of the parameters in an optimizer's groups."""

    def __init__(self, tree: ast.AST) -> None:
        self._nodes = [*ast.walk(tree)]
        self._parents = parents_in(tree)
        first = min(prepares(tree), default=0)
        for node in self._nodes:
            if isinstance(node, ast.ClassDef):
                call_it_self(node)
                if self._is_made_after(node, first):
                    call_groups_anothers(node)
        values: dict[str, list[ast.expr]] = defaultdict(list)
        for node in self._nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        values[target.id].append(node.value)
        self._loops = [
            (target.id, each, node)
            for node in self._nodes
            if isinstance(node, ast.For | ast.comprehension)
            for target, each in rounds(node.target, node.iter)
            if isinstance(target, ast.Name)
        ]
        """Names that go over something, that, and the loop."""
        self._lists: set[str] = set()
        """Names that are never anything but lists of such parameters."""
        self._groups = {name for name, each, _ in self._loops if is_groups(each)}
        for name, given in values.items():
            if all(is_groups(each, is_one=True) for each in given):
                self._groups.add(name)
            if all(self._is_list(each) for each in given):
                self._lists.add(name)

    def lines(self) -> Iterator[int]:
        """Those that read gradients of such parameters."""
        for node in self._nodes:
            if isinstance(node, ast.Call) and reads(node, self._parents):
                given = [*node.args[:1]]
                given += [k.value for k in node.keywords if k.arg == "parameters"]
                if any(map(self._is_list, given)):
                    yield node.lineno
        for name, each, loop in self._loops:
            if self._is_list(each):
                is_for = isinstance(loop, ast.For)
                inside: Any = loop if is_for else self._parents[id(loop)]
                for node in ast.walk(inside):
                    if (
                        isinstance(node, ast.Attribute)
                        and isinstance(node.value, ast.Name)
                        and node.value.id == name
                        and reads(node, self._parents)
                    ):
                        yield inside.lineno

    def value_lines(self) -> Iterator[int]:
        """Those that use or set such parameters, or look for one among them."""
        named = [each for each in self._nodes if isinstance(each, ast.Assign)]
        sets = {
            target.id
            for each in named
            for target in each.targets
            if isinstance(target, ast.Name) and self._is_found_in(each.value)
        }
        for node in self._nodes:
            if isinstance(node, ast.Compare) and any(
                not isinstance(operator, ast.Is | ast.IsNot)
                and (getattr(right, "id", "") in sets or self._is_found_in(right))
                for operator, right in zip(node.ops, node.comparators, strict=True)
            ):
                yield from self._once_prepared(node)
        for name, each, loop in self._loops:
            if self._is_list(each):
                inside: Any = loop
                if isinstance(loop, ast.comprehension):
                    inside = self._parents[id(loop)]
                for node in ast.walk(inside):
                    is_it = isinstance(node, ast.Name) and node.id == name
                    if is_it and self._takes_value(node):
                        yield from self._once_prepared(node)

    def _is_found_in(self, node: ast.expr) -> bool:
        """Whether it is a list or a set of such parameters, or of their ids."""
        if isinstance(node, ast.Call) and node.args:
            names = ("list", "set", "frozenset", "tuple", "map")
            is_same = getattr(node.func, "id", "") in names
            return is_same and self._is_found_in(node.args[-1])
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            element: Any = node.elt
            if (
                isinstance(element, ast.Call)
                and getattr(element.func, "id", "") == "id"
            ):
                element = element.args[0]
            return any(
                getattr(each.target, "id", "") == getattr(element, "id", None)
                and self._is_list(each.iter)
                for each in node.generators
            )
        return self._is_list(node)

    def _takes_value(self, node: Any) -> bool:
        """Whether the parameter of this name is changed, or computed with."""
        around: Any = self._parents[id(node)]
        if isinstance(around, ast.Call) and node is not around.func:
            return name_of(around.func) not in {*ASKING, *CLIPPING}
        if isinstance(around, ast.BinOp | ast.AugAssign):
            return True
        if not isinstance(around, ast.Attribute):
            return False
        if around.attr in ASKED - {"grad"}:
            return isinstance(around.ctx, ast.Store)
        return around.attr != "grad"

    def _once_prepared(self, node: Any) -> Iterator[int]:
        """Its line, unless its function, or the cell, calls `prepare` only after it,
        also where a loop does so several times."""
        scope, loops = node, []
        while not isinstance(scope, ast.FunctionDef | ast.Lambda | ast.Module):
            scope = self._parents[id(scope)]
            if isinstance(scope, ast.For | ast.While) and prepares(scope):
                loops.append(scope)
        calls = prepares(scope)
        is_first = bool(calls) and node.lineno < min(calls)
        if not (is_first and all(makes_its_own(each, node.lineno) for each in loops)):
            yield node.lineno

    def _is_made_after(self, node: ast.ClassDef, line: int) -> bool:
        """Whether all objects of a class are, if there are any."""
        made = [
            each.lineno
            for each in self._nodes
            if isinstance(each, ast.Call) and getattr(each.func, "id", "") == node.name
        ]
        return bool(line and made) and min(made) > line

    def _is_of_lists(self, node: ast.expr) -> bool:
        """Whether it goes over such lists, each a group's."""
        if isinstance(node, ast.Starred):
            return self._is_of_lists(node.value)
        if not isinstance(node, ast.ListComp | ast.GeneratorExp):
            return False
        return self._is_list(node.elt)

    def _is_list(self, node: ast.expr) -> bool:
        """Whether it is a list of parameters from an optimizer's groups."""
        if isinstance(node, ast.Name):
            return node.id in self._lists
        if isinstance(node, ast.Call):  # list(...), filter(..., ...)
            name = name_of(node.func)
            if name in ("chain", "from_iterable", "sum"):
                return any(map(self._is_of_lists, node.args))
            is_same = name in ("list", "tuple", "filter", "set") and node.args
            return bool(is_same) and self._is_list(node.args[-1])
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            element = getattr(node.elt, "id", None)
            return any(
                getattr(each.target, "id", "") == element and self._is_list(each.iter)
                for each in node.generators
            )
        return (
            isinstance(node, ast.Subscript)
            and getattr(node.slice, "value", None) == "params"
            and (
                is_groups(node.value, is_one=True)
                or getattr(node.value, "id", "") in self._groups
            )
        )


def prepares(scope: ast.AST) -> list[int]:
    """The lines that call `prepare`."""
    return [
        each.lineno
        for each in ast.walk(scope)
        if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "prepare"
    ]


def makes_its_own(loop: ast.AST, line: int) -> bool:
    """Whether each round of a loop makes the optimizers, of which it uses the groups up
    to this line: they are none of those that an earlier round has prepared."""
    inside = [*ast.walk(loop)]
    used = {
        root_of(each)
        for each in inside
        if isinstance(each, ast.Attribute)
        and each.attr == "param_groups"
        and each.lineno <= line
    }
    return used <= {
        each.id
        for each in inside
        if isinstance(each, ast.Name)
        and isinstance(each.ctx, ast.Store)
        and each.lineno < line
    }


def root_of(node: Any) -> str:
    """The name that an expression such as `a.b[0].c` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", "")


def rounds(target: Any, over: ast.expr) -> Iterator[tuple[Any, ast.expr]]:
    """What a loop, and each place of a `zip` or an `enumerate`, goes over."""
    yield target, over
    if not isinstance(target, ast.Tuple) or not isinstance(over, ast.Call):
        return
    name = getattr(over.func, "id", "")
    places = target.elts if name == "zip" else target.elts[1:]
    if name in ("zip", "enumerate"):
        for place, each in zip(places, over.args, strict=False):
            yield from rounds(place, each)


def call_groups_anothers(node: ast.ClassDef) -> None:
    """Rename, in a class that wraps an optimizer and takes its groups for its own, what
    these groups are of."""
    inside = [*ast.walk(node)]
    given = [each for each in inside if isinstance(each, ast.Assign)]
    is_wrapper = any(
        is_groups(each.value) and getattr(target, "attr", "") == "param_groups"
        for each in given
        for target in each.targets
    )
    for each in inside if is_wrapper else ():
        if isinstance(each, ast.Attribute) and each.attr == "param_groups":
            each.value = ast.Name("wrapped", ast.Load())


def call_it_self(node: ast.ClassDef) -> None:
    """Rename what the methods of a class call its instance to the usual name."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or is_static(method):
            continue
        inside = [*ast.walk(method)]
        args = [each.arg for each in inside if isinstance(each, ast.arg)]
        own = [*method.args.posonlyargs, *method.args.args]
        if not own or args.count(own[0].arg) > 1:
            continue  # also that of a function within it
        names = [each for each in inside if isinstance(each, ast.Name)]
        found = [each for each in names if each.id == own[0].arg]
        if not any(isinstance(each.ctx, ast.Store) for each in found):
            for each in found:
                each.id = "self"


def is_static(method: ast.FunctionDef) -> bool:
    """Whether its first argument is not the instance."""
    names = {getattr(each, "id", "") for each in method.decorator_list}
    return bool(names & {"staticmethod", "classmethod"})


def is_groups(node: ast.expr, *, is_one: bool = False) -> bool:
    """Whether it is an optimizer's groups, or with `is_one` one of them; not what a
    class of optimizers says of itself."""
    if is_one:
        if not isinstance(node, ast.Subscript) or isinstance(node.slice, ast.Slice):
            return False
        node = node.value
    is_own = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
    return (
        isinstance(node, ast.Attribute) and node.attr == "param_groups" and not is_own
    )


def reads(node: ast.Attribute | ast.Call, parents: dict[int, ast.AST]) -> bool:
    """Whether it computes with a gradient."""
    if isinstance(node, ast.Call):
        return name_of(node.func) in CLIPPING
    if node.attr != "grad" or not isinstance(node.ctx, ast.Load):
        return False
    owner = name_of(node.value)
    around = parents[id(node)]
    while isinstance(around, ast.Attribute) and around.attr == "data":
        around = parents[id(around)]
    is_cleared = isinstance(around, ast.Attribute) and around.attr in HARMLESS
    is_asked = isinstance(around, ast.Compare) and all(
        isinstance(each, ast.Constant) and each.value is None
        for each in around.comparators
    )
    return owner not in OTHER_GRADS and not (is_cleared or is_asked)
