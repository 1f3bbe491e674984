"""Reads in a loop's text what it does for every batch besides a step, which is K times
a step with `--accumulate K`, and where it trains with the size of its batch, a part, or
with what it keeps of such parts."""

import ast
import bisect
import functools
import re
from collections.abc import Iterable
from collections.abc import Iterator

PLAIN_CALLS = {
    *("zero_grad", "backward", "step", "train", "eval", "log", "requires_grad_"),
    *("clip_grad_norm_", "clip_grad_value_", "item"),
    *("breakpoint", "set_trace", "input"),
    *("print", "write", "set_description", "set_postfix", "set_postfix_str", "update"),
}
"""What a call in a loop's body may do as often as there are microbatches."""

LEAVING = ast.Break | ast.Continue

VIEWS = {"to", "cuda", "cpu", "float", "long", "view", "reshape", "flatten", "squeeze"}
"""Methods whose result has the samples of the tensor."""

OPTIONS = {"lr", "weight_decay", "momentum", "betas", "eps"}
"""Of an optimizer, which a loop may set."""

METERS = {"add", "append", "update", "print", "write", "set_postfix", "extend", "range"}
"""What a call that gets the size of a batch may be, which is no update."""

NO_SCHEDULER = re.compile(r"bar|progress|tqdm|count|meter|writer|log", re.IGNORECASE)
"""In the name of what is no scheduler."""

METER = re.compile(rf"{NO_SCHEDULER.pattern}|metric|acc|loss|stat|time", re.IGNORECASE)
"""In the name of what `update` adds numbers to."""
AVERAGE = re.compile(
    "ema|average|avg|swa|shadow|teacher|target|bank|queue|memory|buffer", re.IGNORECASE
)
"""In the name of what `update` changes that the loop trains with."""

COPIES = {"detach", "clone", "item", "data", "sum", "mean"}

RANK_COUNTS = {"world_size", "get_world_size", "WORLD_SIZE", "num_ranks"}

KEEPING = {"append", "appendleft", "extend", "enqueue", "push"} | {
    *("add_", "copy_", "lerp_", "mul_", "sub_")
}
"""Methods by which a list, a queue or a tensor is given something to keep."""

EMPTYING = {"clear", "zero_"}
"""Methods after which it has nothing of the rounds before."""

EXCHANGES = ("all_reduce", "all_gather", ".share", "num_samples")
"""Words of a loop that knows that its batch is a part."""

MARK = "# labkit: of an earlier cell, "
"""Before each function of an earlier cell that a cell uses, after the cell."""

_TRAINS = re.compile(r"\b(prepare|backward)\(")

_BEGINS = re.compile(rf"^{MARK}(\w+)$", re.MULTILINE)


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
        for found in _BEGINS.finditer(code)
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
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(name := node.targets[0].elts[place], ast.Name)
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


def use_of_batch_size(code: str) -> str | None:
    """The first line of a loop over batches that makes the size of its batch a part of
    what it trains with, as "line 12: if seen > 1000:"; None if there is none, or if the
    cell exchanges anything between ranks.

    That are the loss that it multiplies, gradients, an optimizer's option, the argument
    of a scheduler's step, and a condition on which it ends or skips a batch.
    """
    tree = tree_of(code)
    if has_exchanges(code, [*EXCHANGES, "reduction="]):
        return None
    loaders = prepared_names(tree, -1)
    for loop in ast.walk(tree):
        if not (isinstance(loop, ast.For) and names_in(loop.iter, loaders)):
            continue
        found = _Sizes(loop).first_use() if ".backward(" in ast.unparse(loop) else None
        if found is not None:
            return line_of(found)
    return None


def has_exchanges(code: str, words: Iterable[str]) -> bool:
    """Whether a cell knows that its batch is a part, as these words show in it or in
    what it uses that prepares or trains. Of the rest, as a data set or a loss function,
    only what exchanges something between ranks."""
    cell, *others = _BEGINS.split(code)
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
        self._not_kept = not_kept | batch | losses
        """Names of models and loaders, and those that each round sets again."""
        for _ in range(5):  # a name may be used above the line that sets it
            for node in self._nodes:
                self._follow(node)

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
                if isinstance(target, ast.Name | ast.Tuple):
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
            if not isinstance(target, ast.Attribute) or target.attr not in KEEPING:
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
        others = {*named_in(value)} - names
        return len(names & kept) == 1 and bool(others & self._of_batch)


def number_in(loop: ast.For) -> set[str]:
    """The name that `enumerate` gives the number of a batch, if the loop has it."""
    if "enumerate(" in ast.unparse(loop.iter) and isinstance(loop.target, ast.Tuple):
        return {getattr(loop.target.elts[0], "id", "")}
    return set()


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
    while isinstance(value, ast.Subscript) or (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in {*VIEWS, *COPIES}
    ):
        value = value.value if isinstance(value, ast.Subscript) else value.func.value  # type: ignore[attr-defined]
    is_one = isinstance(value, ast.BinOp | ast.ListComp) or is_of_torch(value)
    return is_one and bool({*named_in(value)} & names)


def is_of_torch(value: ast.expr) -> bool:
    """Whether it is what a function of torch returns, or a method of a tensor."""
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func)
    return name.startswith(("torch.", "F.")) or name.endswith((".lerp", ".add", ".mul"))


def named_in(node: ast.AST) -> Iterator[str]:
    """The variables in an expression, and the attributes of `self`."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id != "self":
            yield each.id
        elif isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
            yield f"self.{each.attr}"


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


def names_stored(target: ast.expr) -> list[str]:
    """The plain names among what an assignment sets."""
    return [
        each.id
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]
