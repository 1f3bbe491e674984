"""Reads in a loop's text what it carries from one round to the next, and trains by."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from labkit.rank.code.exchanges import EXCHANGES
from labkit.rank.code.exchanges import has_exchanges
from labkit.rank.code.kept_samples import KEEPING
from labkit.rank.code.kept_samples import counted_in
from labkit.rank.code.trees import has_backward
from labkit.rank.code.trees import line_of
from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import named_in
from labkit.rank.code.trees import names_in
from labkit.rank.code.trees import new_tree_of
from labkit.rank.code.trees import number_in
from labkit.rank.code.trees import prepared_names
from labkit.rank.code.trees import takes_batches
from labkit.rank.code.trees import trains_on_each
from labkit.rank.code.trees import tree_of

Loop = ast.For | ast.While
ROUNDS = ast.For | ast.AsyncFor
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SETTING = ast.Assign | ast.AugAssign | ast.AnnAssign
ENDING = ast.Break | ast.Continue | ast.Return | ast.Raise

REPORTS = re.compile(
    r"print|log|info|debug|warn|write|set_[dp]|eval|valid|test|sampl|generate|plot|save|"
    r"show|display|flush|sync|empty_cache|barrier|scalar|time|^train$|^update$",
    re.IGNORECASE,
)
"""In the name of a function that shows or measures, and trains nothing."""
RECORDS = re.compile(r"log|meter|metric|stat|hist|record|curve|count", re.IGNORECASE)
"""In the name of what a loop has numbers in to show them."""
COMPUTES = {
    *("abs", "all_reduce", "bool", "detach", "float", "format", "int", "item", "len"),
    *("max", "mean", "min", "range", "round", "str", "sum", "tensor", "time", "tolist"),
}
"""Functions whose result is all that there is of them."""


class Carried(NamedTuple):
    """What loops that train have from the rounds before, and decide or compute by. An
    attribute of `self` is as "self.step"."""

    changed: frozenset[str]
    """Names that they change themselves, as a count of steps or the best loss."""
    numbers: frozenset[str]
    """Those in which `enumerate` counts the batches of a pass from 0."""
    rounds: frozenset[str]
    """Those in which `range` counts batches from 0."""
    late: frozenset[str]
    """Of those that are changed, the ones that the cell sets once it has a batch."""


@functools.lru_cache(maxsize=1)
def carried_names(code: str) -> Carried:
    """Those of a cell; not what is only shown."""
    tree = tree_of(code)
    loaders = prepared_names(tree, -1)
    trains = {*training_functions(tree)}
    changed: set[str] = set()
    numbers: set[str] = set()
    rounds: set[str] = set()
    for loop in ast.walk(tree):
        if isinstance(loop, Loop) and is_training(loop, trains):
            changed |= carried_by(loop)
            if isinstance(loop, ast.For):
                numbers |= number_from_0(loop, loaders)
                rounds |= count_of_rounds(loop)
    found = used_names(tree)
    changed &= found
    return Carried(
        frozenset(changed),
        frozenset(numbers & found),
        frozenset(rounds),
        frozenset(changed & set_late(tree)),
    )


def set_late(tree: ast.Module) -> set[str]:
    """The names that a cell sets from its first `next` on, up to its first loop."""
    found: set[str] = set()
    has_batch = False
    for statement in tree.body:
        if isinstance(statement, Loop):
            break
        has_batch |= takes_next(statement)
        found.update(set_by(statement) if has_batch else ())
    return found


def takes_next(statement: ast.stmt) -> bool:
    calls = (each for each in ast.walk(statement) if isinstance(each, ast.Call))
    return not isinstance(statement, FUNCTIONS | ast.ClassDef) and any(
        getattr(each.func, "id", "") == "next" for each in calls
    )


def taken_beside(code: str) -> str | None:
    """The first line that has batches of another DataLoader for a loop that trains, by
    `zip` or `iter`, as "line 12: others = iter(unlabelled)"; None if there is none."""
    tree = tree_of(code)
    trains = {*training_functions(tree)}
    if not any(
        isinstance(each, Loop) and is_training(each, trains) for each in ast.walk(tree)
    ):
        return None
    others = {
        name
        for each in ast.walk(tree)
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)
        if name_of(each.value.func) == "DataLoader"
        for name in set_by(each)
    } - prepared_names(tree, -1)
    for each in ast.walk(tree):
        if isinstance(each, ast.For) and is_training(each, trains):
            parts, takes = [each.iter], "zip"
        elif isinstance(each, ast.Assign):
            parts, takes = [each.value], "iter"
        else:
            continue
        for call in (one for part in parts for one in ast.walk(part)):
            is_taking = isinstance(call, ast.Call) and name_of(call.func) == takes
            if is_taking and names_in(call, others):
                return line_of(each)
    return None


def taken_before(code: str) -> str | None:
    """The first line of a loop that goes through the loader without training, and takes
    of it what other loops train by, as "line 12: for x, y in loader"; None if there is
    none, or if the cell exchanges anything between ranks."""
    tree = tree_of(code)
    if has_exchanges(code, EXCHANGES):
        return None
    loaders = prepared_names(tree, -1)
    trains = {*training_functions(tree)}
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For) or not names_in(loop.iter, loaders):
            continue
        if not is_training(loop, trains) and carried_by(loop) & used_names(tree):
            return line_of(loop)
    return None


def count_of_microbatches(code: str) -> str | None:
    """The first line by which a loop over batches counts its rounds, and trains by the
    count, as "line 12: step += 1"; None if there is none. Not one that is done once a
    step."""
    tree = tree_of(code)
    loaders = prepared_names(tree, -1)
    for loop in ast.walk(tree):
        if not isinstance(loop, Loop) or not trains_in_rounds(loop):
            continue
        if not takes_batches(loop, loaders) and not trains_on_each(loop):
            continue
        once = {
            id(inner)
            for node in ast.walk(loop)
            if isinstance(node, ast.If) and "held_back" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        sums = {*counted_in(loop)} if isinstance(loop, ast.For) else set()
        used = used_names(_WithoutMeans(sums).visit(new_tree_of(code)))
        for each in statements_in(loop.body):
            if not isinstance(each, ast.AugAssign) or id(each) in once:
                continue
            is_count = isinstance(each.value, ast.Constant)
            if is_count and {*set_by(each)} & used:
                return line_of(each)
    return None


class _WithoutMeans(ast.NodeTransformer):
    """Takes away what some sums are divided by: a mean is the same, of microbatches."""

    def __init__(self, sums: set[str]) -> None:
        self._sums = sums

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        is_mean = isinstance(node.op, ast.Div) and self._sums & {*named_in(node.left)}
        return self.visit(node.left) if is_mean else self.generic_visit(node)


def trains_in_rounds(loop: Loop) -> bool:
    """Whether there is a backward pass in its rounds, and in no loop within them."""
    inner = [each for each in statements_in(loop.body) if isinstance(each, Loop)]
    return has_backward(loop.body) and not any(
        has_backward(each.body) for each in inner
    )


def used_names(tree: ast.Module) -> set[str]:
    """The names by whose values loops that train do something."""
    return _Uses(tree, {*training_functions(tree)}).found


def training_functions(tree: ast.Module) -> Iterator[str]:
    """Those of the text in which there is a backward pass."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and has_backward(node.body):
            yield node.name


def is_training(loop: Loop, trains: set[str]) -> bool:
    """Whether there is a backward pass in it, or a call of one of these functions."""
    return has_backward(loop.body) or any(
        isinstance(each, ast.Call) and name_of(each.func) in trains
        for each in ast.walk(loop)
    )


def carried_by(loop: Loop) -> set[str]:
    """The names that a round may use before it sets them, and that a round changes."""
    used, changed = uses_of([loop])
    return used & changed


def uses_of(body: list[ast.stmt]) -> tuple[set[str], set[str]]:
    """The names that statements may use before they set them, and those that they
    change."""
    used, changed = set[str](), set[str]()

    def scan(body: Iterable[ast.stmt], given: set[str]) -> set[str]:
        """The names that these statements leave set, who have `given` ones."""
        for statement in body:
            used.update(read_by(statement) - given)
            changed.update(changed_by(statement))
            given = given | {*set_by(statement)}
            if isinstance(statement, ast.If):
                given = scan(statement.body, given) & scan(statement.orelse, given)
                continue
            for inner in bodies_of(statement):
                given = scan(inner, given)
        return given

    scan(body, set())
    within = {
        name
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.comprehension)
        for name in named_in(node.target)
    }
    return used - within, changed


def number_from_0(loop: ast.For, loaders: set[str]) -> set[str]:
    """The name in which `enumerate` numbers the batches of a loop, unless it says where
    to begin."""
    calls = [each for each in ast.walk(loop.iter) if isinstance(each, ast.Call)]
    counts = [each for each in calls if name_of(each.func) == "enumerate"]
    is_from_0 = all(len(each.args) == 1 and not each.keywords for each in counts)
    return number_in(loop) if is_from_0 and names_in(loop.iter, loaders) else set()


def count_of_rounds(loop: ast.For) -> set[str]:
    """The name that goes through `range(200)` in a loop whose rounds each take a batch
    by `next`: a run that resumes has as many rounds again."""
    call = loop.iter
    if not isinstance(call, ast.Call) or name_of(call.func) != "range":
        return set()
    is_from_0 = len(call.args) == 1 or isinstance(call.args[0], ast.Constant)
    is_of_steps = takes_batches(loop, set()) and trains_in_rounds(loop)
    return {*named_in(loop.target)} if is_from_0 and is_of_steps else set()


def bodies_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statements within it, by part."""
    if isinstance(statement, FUNCTIONS | ast.ClassDef):
        return
    for part in ("body", "orelse", "finalbody"):
        yield getattr(statement, part, [])
    for handler in [*getattr(statement, "handlers", []), *cases_of(statement)]:
        yield handler.body


def cases_of(statement: ast.stmt) -> list[ast.match_case]:
    return statement.cases if isinstance(statement, ast.Match) else []


def statements_in(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All of them, outer ones first; none of functions that are defined within."""
    for statement in body:
        yield statement
        for inner in bodies_of(statement):
            yield from statements_in(inner)


def own_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Its expressions, without the statements within it."""
    if isinstance(statement, FUNCTIONS | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
    yield from (each.guard for each in cases_of(statement) if each.guard is not None)


def read_by(statement: ast.stmt) -> set[str]:
    """The names that a statement reads, without the statements within it."""
    found: set[str] = set()
    for part in own_parts(statement):
        is_target = isinstance(statement, ast.Assign) and part in statement.targets
        is_target |= part is getattr(statement, "target", None)
        is_set = is_target and not isinstance(statement, ast.AugAssign)
        is_own = isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"
        if is_set and (is_own or isinstance(part, ast.Name | ast.Tuple | ast.List)):
            continue
        found |= {*named_in(part)}
    return found


def set_by(statement: ast.stmt) -> Iterator[str]:
    """The names to which a statement gives other values."""
    targets: list[ast.AST] = []
    if isinstance(statement, ast.Assign):
        targets = [*statement.targets]
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign | ROUNDS):
        targets = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        targets = [each.optional_vars for each in statement.items if each.optional_vars]
    waiting = [*targets]
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List | ast.Starred):
            waiting += ast.iter_child_nodes(target)
        elif isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            yield f"self.{target.attr}"


def changed_by(statement: ast.stmt) -> set[str]:
    """The names that have something else after it: also what has an item set, or is
    given something to keep."""
    found = {*set_by(statement)}
    if isinstance(statement, ast.Assign | ast.AugAssign):
        targets = getattr(statement, "targets", None) or [statement.target]  # type: ignore[union-attr]
        parts = [each.value for each in targets if isinstance(each, ast.Subscript)]
        found |= {name for each in parts for name in named_in(each)}
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr in KEEPING:
            found |= {*named_in(function.value)}
    return found


class _Uses:
    """The names by whose values something is done, other than to show them."""

    def __init__(self, tree: ast.Module, trains: set[str]) -> None:
        self.found: set[str] = set()
        self._trains = trains
        self._of: defaultdict[str, set[str]] = defaultdict(set)
        """By name, those that it is computed from."""
        loops = (each for each in ast.walk(tree) if isinstance(each, Loop))
        for loop in loops:
            if is_training(loop, trains):
                self._follow([loop])
        for each in ast.walk(tree):  # also after the loop
            if isinstance(each, ast.Call) and name_of(each.func) == "load_state_dict":
                self.found |= {name for one in each.args for name in named_in(one)}
        for statement in statements_in(tree.body):
            if isinstance(statement, SETTING):
                self._note(changed_by(statement), read_by(statement), frozenset())
        waiting = [*self.found]
        while waiting:
            new = self._of[waiting.pop()] - self.found
            self.found |= new
            waiting += new

    def _follow(
        self, body: Iterable[ast.stmt], under: AbstractSet[str] = frozenset()
    ) -> None:
        """`under` are the names of the conditions under which it is done."""
        for statement in body:
            within = under
            if isinstance(statement, ast.If):
                test = {*named_in(statement.test)}
                body = [*statement.body, *statement.orelse]
                if keeps_best(statement) or not only_shows(body, self._trains):
                    self.found |= test
                within = under | test
            elif isinstance(statement, ast.While):
                self.found |= {*named_in(statement.test)}
            elif isinstance(statement, ast.For):
                self.found |= {*named_in(statement.iter)}
            elif isinstance(statement, ast.Return):
                self._see_calls(statement)
            else:
                self._see(statement, under)
            for inner in bodies_of(statement):
                self._follow(inner, within)

    def _see(self, statement: ast.stmt, under: AbstractSet[str]) -> None:
        of = read_by(statement)
        into = changed_by(statement)
        is_of_names = set(set_by(statement)) == into
        if isinstance(statement, ast.Expr):
            call = statement.value
            if into:  # given something to keep
                self._note(into, of, under)
            elif isinstance(call, ast.Call) and not shows(call, self._trains):
                self.found |= of | under
        elif isinstance(statement, SETTING):
            if is_of_names or any(map(RECORDS.search, into)):
                self._note(into, of, under)
            else:  # an item, or an attribute, of what may be an optimizer
                self.found |= of | under
        self._see_calls(statement)

    def _note(self, into: set[str], of: set[str], under: AbstractSet[str]) -> None:
        for name in into:
            self._of[name] |= of | under

    def _see_calls(self, statement: ast.stmt) -> None:
        """What functions that may train are given."""
        for part in own_parts(statement):
            for each in ast.walk(part):
                if not isinstance(each, ast.Call) or shows(each, self._trains):
                    continue
                if not computes(each):
                    given = [*each.args, *(word.value for word in each.keywords)]
                    self.found |= {name for one in given for name in named_in(one)}


def keeps_best(statement: ast.If) -> bool:
    """Whether it saves something where it is better than what it was compared with: a
    worse one would take its place."""
    sets = {name for each in statements_in(statement.body) for name in set_by(each)}
    return not sets.isdisjoint(named_in(statement.test)) and any(
        isinstance(each, ast.Call) and "save" in name_of(each.func).lower()
        for each in ast.walk(statement)
    )


def shows(call: ast.Call, trains: set[str]) -> bool:
    """Whether a call shows or measures something, and is none of these functions."""
    name = name_of(call.func)
    return name not in trains and bool(REPORTS.search(name))


def only_shows(body: list[ast.stmt], trains: set[str]) -> bool:
    """Whether statements train nothing, and end nothing."""
    return not any(
        isinstance(each, ENDING)
        or (isinstance(each, SETTING) and {*set_by(each)} != changed_by(each))
        or (isinstance(each, ast.Expr) and may_train(each.value, trains))
        for each in statements_in(body)
    )


def may_train(value: ast.expr, trains: set[str]) -> bool:
    if not isinstance(value, ast.Call) or name_of(value.func) in KEEPING:
        return False
    return not shows(value, trains)


def computes(call: ast.Call) -> bool:
    """Whether all that there is of a call is its result."""
    is_torchs = ast.unparse(call.func).startswith(("torch.", "math.", "np.", "F."))
    return is_torchs or name_of(call.func) in {*COMPUTES, *KEEPING}
