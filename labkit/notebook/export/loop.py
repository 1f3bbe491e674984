"""Finds a cell's call of `prepare`, and its loop, where both can be written out."""

import ast
import re
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.notebook.export.cells import begin_of
from labkit.notebook.export.names import names_of
from labkit.notebook.export.names import related
from labkit.notebook.export.needed import CALLS

_OF_LABKIT = re.compile(
    r"IterableDataset|IterDataPipe|SyncBatchNorm|torch\.compile|\.compile\("
    r"""|DataLoader\(|["']meta["']|autograd\.grad|torch\.func"""
)
"""What labkit sees to in a way of its own."""
_FIT = """\
{bind}{model}, {optimizer}, {loader} = prepare(
    {model}, {optimizer}, {dataset}, batch_size={batch_size}, shuffle={shuffle}
)
for {epoch} in range({epochs}):
    {model}.train()
    for {x}, {y} in {loader}:
        {loss} = {loss_fn}({model}({x}), {y})
        {loss}.backward()
        {optimizer}.step()
        {optimizer}.zero_grad()"""


class NotPlainError(Exception):
    """A run of which it is not certain that a script in plain PyTorch has its losses;
    the words say why."""


@dataclass(frozen=True)
class Loop:
    """A call of `prepare`, and the loop over the loader that it returns."""

    model: str
    optimizer: str
    loader: str
    dataset: str
    """Source of what is loaded, and of the two below."""
    batch_size: str
    shuffle: str
    prepare: ast.Assign
    making: ast.Assign | None
    """The statement that makes the optimizer, after which nothing has to do with the
    model; None where there is no such."""
    loop: ast.For
    batch: tuple[str, ...]
    """The names of a batch's tensors."""
    loss: ast.expr
    backward: ast.stmt
    step: ast.stmt
    zero_grad: ast.stmt


def without_fit(code: str, earlier: str) -> str:
    """The cell with `fit` written out as `prepare` and the loop that it stands for."""
    tree = ast.parse(code)
    found = [
        node
        for node in tree.body
        if isinstance(node, ast.Expr) and _name_of_call(node.value) == "fit"
    ]
    if not found:
        return code
    call = found[0].value
    assert isinstance(call, ast.Call)
    given = dict(zip(("model", "dataset", "loss_fn"), call.args, strict=False))
    given |= {each.arg or "**": each.value for each in call.keywords}
    known = ("model", "dataset", "loss_fn", "optimizer", "batch_size", "epochs")
    if others := [name for name in given if name not in (*known, "shuffle")]:
        raise NotPlainError(f"the cell calls fit with {others[0]}")
    if missing := [name for name in known[:-1] if name not in given]:
        raise NotPlainError(f"the cell calls fit without {missing[0]}")
    taken = names_of(code)
    used = taken.binds | taken.all_needs
    text = {name: ast.unparse(value) for name, value in given.items()}
    loss_fn, bind = given["loss_fn"], ""
    if not isinstance(given["model"], ast.Name):
        raise NotPlainError("fit is called with a model that has no name")
    if _takes_no_target(loss_fn, earlier, tree):
        raise NotPlainError("the loss function takes no target")
    if not isinstance(given["optimizer"], ast.Name):
        name = free("optimizer", used)
        bind, text["optimizer"] = f"{name} = {text['optimizer']}\n", name
    if not isinstance(loss_fn, ast.Name | ast.Attribute):
        name = free("loss_fn", used)
        bind, text["loss_fn"] = f"{name} = {text['loss_fn']}\n{bind}", name
    names = {each: free(each, used) for each in ("loader", "epoch", "x", "y", "loss")}
    written = _FIT.format(
        **{"epochs": "1", "shuffle": "True", **text, **names, "bind": bind}
    )
    lines = code.splitlines()
    lines[begin_of(found[0]) - 1 : found[0].end_lineno] = [written]
    return "\n".join(lines)


def _takes_no_target(loss_fn: ast.expr, earlier: str, tree: ast.Module) -> bool:
    if isinstance(loss_fn, ast.Lambda):
        return len(loss_fn.args.args) != 2
    made = [
        node.args
        for node in [*ast.parse(earlier).body, *tree.body]
        if isinstance(node, ast.FunctionDef) and node.name == ast.unparse(loss_fn)
    ]
    return bool(made) and len(made[-1].posonlyargs + made[-1].args) < 2


def find_loop(code: str, earlier: str) -> Loop:
    """The one call of `prepare` of a cell, and its one loop.

    NotPlainError where the cell does anything that labkit sees to, and plain PyTorch
    does not.
    """
    if seen := _OF_LABKIT.search(f"{earlier}\n{code}"):
        raise NotPlainError(f"there is {seen[0].rstrip('(')!r} in its cells")
    tree = ast.parse(code)
    _check_calls(tree)
    prepare = _prepare_of(tree)
    assert isinstance(prepare.value, ast.Call)
    names = _names(prepare.targets[0], 3)
    given = _names(ast.Tuple(prepare.value.args[:2]), 2)
    if not names or names[:2] != given:
        raise NotPlainError(
            "it is not `model, optimizer, loader = prepare(model, optimizer, ...)`"
        )
    more = {each.arg: ast.unparse(each.value) for each in prepare.value.keywords}
    if len(prepare.value.args) != 3 or more.keys() - {"batch_size", "shuffle"}:
        raise NotPlainError("prepare has further arguments")
    if "batch_size" not in more:
        raise NotPlainError("prepare is called without batch_size")
    model, optimizer, loader = names
    loop = _loop_over(tree, loader)
    body = loop.body
    backward = _only(body, tree, lambda call: _method(call) == "backward", "backward()")
    step = _only(body, tree, _is_method_of(optimizer, "step"), f"{optimizer}.step()")
    zero_grad = _only(
        body, tree, _is_method_of(optimizer, "zero_grad"), f"{optimizer}.zero_grad()"
    )
    assert isinstance(backward, ast.Expr)
    assert isinstance(backward.value, ast.Call)
    assert isinstance(backward.value.func, ast.Attribute)
    if body.index(step) < body.index(backward):
        raise NotPlainError(f"{optimizer}.step() comes before the backward pass")
    if body.index(backward) < body.index(zero_grad) < body.index(step):
        raise NotPlainError(f"{optimizer}.zero_grad() comes right before the step")
    _check_lines(tree, loop)
    shared = _check_aliases(tree, earlier, (model, optimizer), prepare)
    making = _making(tree, model, optimizer, prepare)
    if making is not None and _words(making) & shared:
        making = None  # its parameters were taken from the model before
    _check_uses(tree, (model, optimizer, loader), prepare, loop, backward)
    return Loop(
        model,
        optimizer,
        loader,
        dataset=ast.unparse(prepare.value.args[2]),
        batch_size=more["batch_size"],
        shuffle=more.get("shuffle", "True"),
        prepare=prepare,
        making=making,
        loop=loop,
        batch=_batch_of(loop),
        loss=backward.value.func.value,
        backward=backward,
        step=step,
        zero_grad=zero_grad,
    )


def _check_calls(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name in CALLS and name not in ("prepare", "log"):
                raise NotPlainError(f"the cell calls {name}")
            case ast.Call(func=ast.Name(id="log"), keywords=keywords):
                if any(each.arg in ("loss", None) for each in keywords):
                    raise NotPlainError("the cell logs a loss of its own")


def _prepare_of(tree: ast.Module) -> ast.Assign:
    named = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "prepare"
    ]
    found = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and _name_of_call(node.value) == "prepare"
    ]
    if not named:
        raise NotPlainError("the cell itself calls neither prepare nor fit")
    if len(named) != 1 or len(found) != 1 or len(found[0].targets) != 1:
        raise NotPlainError("prepare is not called once, in a line of its own")
    return found[0]


def _loop_over(tree: ast.Module, loader: str) -> ast.For:
    """The loop over the loader: at the top, or in one over a range."""
    found = []
    for node in tree.body:
        within = [node]
        if isinstance(node, ast.For) and _name_of_call(node.iter) == "range":
            within = node.body
            if node.orelse:
                within = []
        for each in within:
            if isinstance(each, ast.For) and loader in _words(each.iter):
                found.append((node, each))
    if len(found) != 1 or found[0][1].orelse:
        raise NotPlainError(f"there is not one loop over {loader}, or it is in a block")
    outer, loop = found[0]
    leaves = ast.Break | ast.Continue | ast.Return | ast.Yield | ast.YieldFrom
    if any(isinstance(node, leaves | ast.Try) for node in ast.walk(outer)):
        raise NotPlainError("the loop may leave out a part of its work")
    return loop


def _batch_of(loop: ast.For) -> tuple[str, ...]:
    target = loop.target
    if _name_of_call(loop.iter) == "enumerate":
        assert isinstance(loop.iter, ast.Call)
        if not loop.iter.args or not isinstance(loop.iter.args[0], ast.Name):
            raise NotPlainError("the loop is over more than the loader")
        pair = target.elts if isinstance(target, ast.Tuple) else []
        target = pair[1] if len(pair) == 2 else target
    elif not isinstance(loop.iter, ast.Name):
        raise NotPlainError("the loop is over more than the loader")
    names = _names(target)
    if not names:
        raise NotPlainError("the loop does not take a batch apart, as in `for x, y`")
    return names


def _only(body: list[ast.stmt], tree: ast.Module, is_it: object, what: str) -> ast.stmt:
    """The one statement of the loop that is such a call, without arguments."""
    assert callable(is_it)
    everywhere = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and is_it(n)]
    found = [
        node
        for node in body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and is_it(node.value)
        and not (node.value.args or node.value.keywords)
    ]
    if len(everywhere) != 1 or len(found) != 1:
        raise NotPlainError(f"the loop does not have one {what}, outside of blocks")
    return found[0]


def _making(
    tree: ast.Module, model: str, optimizer: str, prepare: ast.Assign
) -> ast.Assign | None:
    """The statement that makes the optimizer."""
    found = [
        node
        for node in tree.body[: tree.body.index(prepare)]
        if optimizer in names_of(ast.unparse(node)).binds
    ]
    if not found:
        return None
    if len(found) != 1 or not isinstance(found[0], ast.Assign):
        raise NotPlainError(f"{optimizer} is not made by one assignment")
    between = tree.body[tree.body.index(found[0]) + 1 : tree.body.index(prepare)]
    return None if any(model in _words(each) for each in between) else found[0]


def _check_aliases(
    tree: ast.Module, earlier: str, names: tuple[str, str], prepare: ast.Assign
) -> frozenset[str]:
    """Other names for what prepare takes, or for parts of it. NotPlainError where one
    is used after it: a wrapped model may have others by then."""
    at = tree.body.index(prepare)
    shared = related([*ast.parse(earlier).body, *tree.body[:at]], {*names})
    for node in tree.body[at + 1 :]:
        if used := _words(node) & shared:
            raise NotPlainError(
                f"{min(used)}, which the loop uses, may share {names[0]}'s parameters"
            )
    return shared


def _check_uses(
    tree: ast.Module,
    names: tuple[str, str, str],
    prepare: ast.Assign,
    loop: ast.For,
    backward: ast.stmt,
) -> None:
    """NotPlainError for a model, optimizer or loader that is used in another way than
    in the loop that every tutorial has."""
    model, optimizer, loader = names
    allowed = {id(node) for node in ast.walk(prepare)}
    for statement in tree.body[: tree.body.index(prepare)]:
        if optimizer in _words(statement) - names_of(ast.unparse(statement)).binds:
            raise NotPlainError(f"{optimizer} is used before prepare")
        if {model, optimizer, loader} & names_of(ast.unparse(statement)).needs_later:
            raise NotPlainError("a function of the cell uses what prepare takes")
        allowed |= {id(each) for each in ast.walk(statement)}
    calls = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) as called) if name == model:
                calls.append(node)
                allowed.add(id(called))
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name) as of, attr=method)
            ) if (name, method) in (
                *((model, "train"), (optimizer, "step"), (optimizer, "zero_grad")),
            ):
                allowed.add(id(of))
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name() as of]):
                allowed.add(id(of))
    allowed |= {id(node) for node in ast.walk(loop.iter)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names and id(node) not in allowed:
            raise NotPlainError(
                f"the cell uses {node.id} in another way than the plain loop does, in "
                f"line {node.lineno} of it"
            )
    before = loop.body[: loop.body.index(backward) + 1]
    plain = [
        node
        for each in before
        if isinstance(each, ast.Assign | ast.AnnAssign | ast.Expr)
        for node in ast.walk(each)
    ]
    in_plain = [call for call in calls if any(call is node for node in plain)]
    here = [call for call in calls if call.lineno > (prepare.end_lineno or 0)]
    if len(in_plain) != 1 or len(here) != 1:
        raise NotPlainError(f"the loop does not call {model} once, outside of blocks")


def _check_lines(tree: ast.Module, loop: ast.For) -> None:
    """NotPlainError where two statements share a line."""
    for block in (tree.body, loop.body):
        ends = [node.end_lineno for node in block]
        if len(set(ends)) != len(ends):
            raise NotPlainError("two statements of the cell are on one line")
    if loop.body[0].lineno <= (loop.iter.end_lineno or 0):
        raise NotPlainError("the loop is in one line")


# ---- names ----


def _names(target: ast.expr, number: int | None = None) -> tuple[str, ...]:
    """The names of a tuple of names; none for anything else."""
    if not isinstance(target, ast.Tuple | ast.List):
        return ()
    found = tuple(each.id for each in target.elts if isinstance(each, ast.Name))
    is_whole = len(found) == len(target.elts)
    return found if is_whole and number in (None, len(found)) else ()


def _name_of_call(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id
    return None


def _method(call: ast.Call) -> str | None:
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def _is_method_of(owner: str, method: str) -> Callable[[ast.Call], bool]:
    def is_it(call: ast.Call) -> bool:
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr=attr):
                return (name, attr) == (owner, method)
        return False

    return is_it


def _words(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def free(name: str, taken: Iterable[str]) -> str:
    return next(each for each in _variants(name) if each not in taken)


def _variants(name: str) -> Iterator[str]:
    while True:
        yield name
        name += "_"
