"""Reads in a loop's text what it keeps, or counts, of its samples, which are a part of
those of a batch."""

import ast
from collections.abc import Iterable
from collections.abc import Iterator

from labkit.rank.code.exchanges import EXCHANGES
from labkit.rank.code.exchanges import has_exchanges
from labkit.rank.code.exchanges import quotients
from labkit.rank.code.trees import COPIES
from labkit.rank.code.trees import VIEWS
from labkit.rank.code.trees import has_backward
from labkit.rank.code.trees import line_of
from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import named_in
from labkit.rank.code.trees import names_in
from labkit.rank.code.trees import number_in
from labkit.rank.code.trees import prepared_names
from labkit.rank.code.trees import trains_on_each
from labkit.rank.code.trees import tree_of

KEEPING = {"append", "appendleft", "extend", "enqueue", "push"} | {
    *("add_", "copy_", "lerp_", "mul_", "sub_")
}
"""Methods by which a list, a queue or a tensor is given something to keep."""

OBSERVING = {"add", "observe", "put", "remember", "store", "update"}
"""Those by which a class of the loop's own may be, such as running statistics."""

OF_NUMBERS = {"min", "max", "abs", "float", "round"}
"""Functions of Python's."""

EMPTYING = {"clear", "zero_"}
"""Methods after which it has nothing of the rounds before."""


def kept_of_samples(code: str) -> str | None:
    """The first line by which a loop over batches keeps what it has computed of its
    samples and makes it a part of later losses, as "line 12: queue.append(keys)"; None
    if there is none, or if the cell exchanges anything between ranks.

    That are an average of outputs, a queue of keys, a baseline. Not the state of a
    recurrent model, which each sample has for itself.
    """
    tree = tree_of(code)
    if has_exchanges(code, EXCHANGES):
        return None
    loaders = prepared_names(tree, -1)
    given = prepared_names(tree, 0) | prepared_names(tree, 1)
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For) or not has_backward(loop.body):
            continue
        if names_in(loop.iter, loaders) or trains_on_each(loop):
            found = _Kept(loop, given | loaders).first()
            if found is not None:
                return line_of(found)
    return None


def count_by_dataset(code: str, *, is_loader: bool = False) -> str | None:
    """The first line that divides what a loop counts of its batches by the length of
    the whole dataset, as "line 12: correct / len(loader.dataset)"; None if there is
    none, or if the cell exchanges anything between ranks. `is_loader` where `prepare`
    gets a DataLoader, whose own length is that of its batches."""
    tree = tree_of(code)
    if has_exchanges(code, [".share", "reduce("]):
        return None
    loaders = prepared_names(tree, -1)
    data = {*given_data(tree)}
    datasets = {f"len({each}.dataset)" for each in data}
    whole_data = {*data_of_loaders(tree)} if is_loader else data
    datasets |= {f"len({each})" for each in whole_data - loaders}
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For):
            continue
        if not names_in(loop.iter, loaders) and not trains_on_each(loop):
            continue
        whole = datasets | {f"len({each}.dataset)" for each in named_in(loop.iter)}
        whole |= names_of(whole, tree)
        counts = {*counted_in(loop)}
        for node in ast.walk(tree):
            for value, divisor in quotients(node):
                if counts & {*named_in(value)} and ast.unparse(divisor) in whole:
                    return line_of(node)  # type: ignore[arg-type]
    return None


def given_data(tree: ast.Module) -> Iterator[str]:
    """The variables that `prepare` gets as its data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) == "prepare":
            data = node.args[2:3] + [
                k.value for k in node.keywords if k.arg == "dataset"
            ]
            yield from (each.id for each in data if isinstance(each, ast.Name))


def data_of_loaders(tree: ast.Module) -> Iterator[str]:
    """The variables of which DataLoaders are made that `prepare` gets."""
    data = {*given_data(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            is_given = any(names_in(each, data) for each in node.targets)
            if is_given and name_of(node.value.func) == "DataLoader":
                first = node.value.args[:1]
                yield from (each.id for each in first if isinstance(each, ast.Name))


def names_of(texts: set[str], tree: ast.Module) -> set[str]:
    """The variables that are set to one of these expressions."""
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in texts
        for target in node.targets
        for name in named_in(target)
    }


def counted_in(loop: ast.For) -> Iterator[str]:
    """The variables to which its rounds add something that is no constant."""
    for node in ast.walk(loop):
        if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add):
            continue
        if not isinstance(node.value, ast.Constant):
            yield from named_in(node.target)


class _Kept:
    """What a loop over batches keeps of them for its next rounds."""

    def __init__(self, loop: ast.For, not_kept: set[str]) -> None:
        batch = {*named_in(loop.target)} - number_in(loop)
        self._nodes = [node for part in loop.body for node in ast.walk(part)]
        losses = {
            name
            for node in self._nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if node.func.attr == "backward"
            for name in named_in(node.func.value)
        }
        self._of_batch, self._in_loss = set(batch), set(losses)
        self._not_kept = not_kept | batch
        """Names of models and loaders, and those that each round sets again."""
        self._begun = set(map(id, statements_that_begin(self._nodes)))
        for _ in range(5):  # a name may be used above the line that sets it
            for node in self._nodes:
                self._follow(node)
        self._decided: dict[int, set[str]] = {}
        """By a statement, the names that decide whether a round does it."""
        for node in self._nodes:
            for each in ast.walk(node) if isinstance(node, ast.If) else ():
                names = self._decided.setdefault(id(each), set())
                names.update(named_in(node.test))  # type: ignore[attr-defined]

    def _follow(self, node: ast.AST) -> None:
        if isinstance(node, ast.For):
            of, names = {*named_in(node.iter)}, {*named_in(node.target)}
            self._not_kept |= names
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            of, names = {*named_in(node.value)}, {*named_in(node.target)}
            if isinstance(node.target, ast.Name):
                self._not_kept |= names - of
        elif isinstance(node, ast.Call | ast.Delete):
            self._not_kept |= emptied_by(node)
            return
        elif isinstance(node, ast.Assign):
            of = {*named_in(node.value)}
            names = {each for target in node.targets for each in named_in(target)}
            for target in node.targets:
                is_set = isinstance(target, ast.Name | ast.Tuple)
                if is_set and id(node) not in self._begun:
                    self._not_kept |= {*named_in(target)} - of
            if isinstance(node.value, ast.Call) and not is_of_torch(node.value):
                given = (n for each in node.value.args for n in named_in(each))
                self._not_kept |= names.intersection(given)  # a recurrent state
        else:
            return
        if of & self._of_batch:
            self._of_batch |= names
        if names & self._in_loss:
            self._in_loss |= of

    def first(self) -> ast.stmt | None:
        """The first statement that keeps something."""
        kept = self._in_loss - self._not_kept
        for node in self._nodes:
            if isinstance(node, ast.stmt) and self._keeps(node, kept):
                return node
        return None

    def _keeps(self, node: ast.stmt, kept: set[str]) -> bool:
        value: ast.expr
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            target, value = node.value.func, node.value
            if (
                not isinstance(target, ast.Attribute)
                or target.attr not in KEEPING | OBSERVING
            ):
                return False
            if target.attr == "copy_" and not isinstance(target.value, ast.Subscript):
                of = {*named_in(target.value)}
                if not any(of & {*named_in(each)} for each in node.value.args):
                    return False  # all of it is set again
        elif isinstance(node, ast.AugAssign):
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            is_part = isinstance(target, ast.Subscript) and not is_named(target)
            if not is_part and not is_mixed(value, {*named_in(target)}):
                return False
        else:
            return False
        while isinstance(target, ast.Subscript | ast.Call | ast.Attribute):
            if (
                isinstance(target, ast.Attribute)
                and ast.unparse(target.value) == "self"
            ):
                break
            target = target.func if isinstance(target, ast.Call) else target.value
        names = {*named_in(target)}
        others = {*named_in(value), *self._decided.get(id(node), ())} - names
        return len(names & kept) == 1 and bool(others & self._of_batch)


def statements_that_begin(nodes: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Those in `if center is None: center = ...`, done in the first round alone."""
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith(" is None"):
            yield from node.body


def emptied_by(node: ast.Call | ast.Delete) -> set[str]:
    """The names that have nothing in them any more, as by `losses.clear()`."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Delete):
        parts = [each for each in node.targets if isinstance(each, ast.Subscript)]
        found += [each.value for each in parts if ast.unparse(each.slice) == ":"]
    elif isinstance(node.func, ast.Attribute) and node.func.attr in EMPTYING:
        found.append(node.func.value)
    whole = [each for each in found if isinstance(each, ast.Name | ast.Attribute)]
    return {name for each in whole for name in named_in(each)}


def is_named(target: ast.Subscript) -> bool:
    """Whether this is an element with a name, as of a dict of losses."""
    key = target.slice
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def is_mixed(value: ast.expr, names: set[str]) -> bool:
    """Whether one of these names is mixed with something by operators, or by a function
    of torch: what any other is given may be a recurrent model's state."""
    while isinstance(value, ast.Subscript) or is_of_number(value):
        value = value.value if isinstance(value, ast.Subscript) else value.func.value  # type: ignore[attr-defined]
    if isinstance(value, ast.IfExp):
        return is_mixed(value.body, names) or is_mixed(value.orelse, names)
    is_one = isinstance(value, ast.BinOp | ast.ListComp) or is_of_torch(value)
    return is_one and bool({*named_in(value)} & names)


def is_of_number(value: ast.expr) -> bool:
    """Whether it is a method of what operators give, or one that changes no number."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
        return False
    of = value.func.value
    return isinstance(of, ast.BinOp) or value.func.attr in {*VIEWS, *COPIES}


def is_of_torch(value: ast.expr) -> bool:
    """Whether it is what a function of torch, of NumPy or of Python's numbers returns,
    or a method of a tensor."""
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func)
    return (
        name.startswith(("torch.", "F.", "np.", "numpy.", "math."))
        or name.endswith((".lerp", ".add", ".mul"))
        or name in OF_NUMBERS
    )
