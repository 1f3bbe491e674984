"""Runs a cell of a run that resumes up to where the run was.

It runs from its first line, and passes over its data have no batches there. So what
follows a pass has nothing to show, and may lack what a batch would have set.
"""

import ast
import builtins
import contextlib
import inspect
import textwrap
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from labkit.checks import UnsupportedLoopError
from labkit.checks import UserError
from labkit.rank.code.carried import computes
from labkit.rank.code.carried import shows
from labkit.rank.code.carried import training_functions
from labkit.rank.code.carried import uses_of
from labkit.rank.code.loop_body import evaluates
from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import names_in
from labkit.rank.code.trees import prepared_names
from labkit.rank.code.trees import trains_on_each

REPLAY_NAME = "__labkit_replay__"
"""What the cell has a `Replay` by."""
ERRORS = (NameError, ZeroDivisionError)
"""Of what a batch would have set or counted."""
NO_BATCHES = (
    "this run resumes: the cell runs from its first line, and passes over the loader "
    "have no batches up to where the checkpoint was taken. What a batch sets or counts "
    "is not there after them: set it before the loop; or have the loop in the "
    "%%dist_train cell itself, where statements that need it are skipped"
)
TAKING = {"enumerate", "iter", "len", "list", "next", "print", "tqdm", "zip"}
"""Functions of a loader that go through no whole pass by themselves."""
OF_LIBRARIES = {
    name
    for kind in (torch.Tensor, nn.Module, LRScheduler, dict, list, str)
    for name in dir(kind)
} | {"close", "copy", "deepcopy", "isfinite", "isinf", "isnan", "sqrt"}
"""Methods that go through no loader."""


class Replay:
    """For the cell of a run that resumes: rewrites it, as an AST transformer of a
    shell, and tells the cell how far it is.

    Of what follows a pass, that is skipped which needs what a batch sets, until there
    is one, and which only shows or evaluates, until the loop is where the run was.
    """

    def __init__(
        self,
        *,
        is_before: Callable[[], bool],
        has_batches: Callable[[], bool],
        num_passes: Callable[[], int],
    ) -> None:
        """`is_before()` says whether the loop has not come to where the run was,
        `has_batches()` whether it has had one since, and `num_passes()` how many passes
        it has begun."""
        self._is_before = is_before
        self._has_batches = has_batches
        self._num_passes = num_passes

    @property
    def is_there(self) -> bool:
        """Whether the loop is where the run was."""
        return not self._is_before()

    @property
    def has_batches(self) -> bool:
        """Whether it has had a batch."""
        return self._has_batches()

    @contextlib.contextmanager
    def tolerating(self, *, is_call: bool) -> Iterator[None]:
        """An error for want of a batch ends no more than what is within it; not one of
        labkit's, and none of a call that has not gone through the loader yet."""
        num_before = self._num_passes()
        try:
            yield
        except (UnsupportedLoopError, UserError, dist.DistError):
            raise
        except Exception:
            if self.has_batches or (is_call and self._num_passes() == num_before):
                raise

    def visit(self, tree: ast.Module) -> ast.Module:
        """The cell, rewritten."""
        passes = _Passes(tree)
        value = [each for each in tree.body[-1:] if passes.is_displayed(each)]
        body = tree.body[: len(tree.body) - len(value)]
        tree.body = [*passes.rewritten(body), *value]
        return ast.fix_missing_locations(tree)

    @contextlib.contextmanager
    def of_function(self, function: Any) -> Iterator[Any]:
        """`function`, rewritten as a cell is: itself where its text is not known, or
        where it is not made of that text alone."""
        is_plain = inspect.isfunction(function) and not function.__closure__
        try:
            text = textwrap.dedent(inspect.getsource(function)) if is_plain else ""
            tree = ast.parse(text)
        except (OSError, SyntaxError):
            tree = ast.Module([], [])
        match tree.body:
            case [ast.FunctionDef(decorator_list=[], name=function.__name__)]:
                pass
            case _:
                yield function
                return
        ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
        code = compile(self.visit(tree), function.__code__.co_filename, "exec")
        made: dict[str, Any] = {}
        exec(code, function.__globals__, made)
        function.__globals__[REPLAY_NAME] = self
        try:
            yield made[function.__name__]
        finally:
            function.__globals__.pop(REPLAY_NAME, None)


class _Passes:
    """The passes of a cell over what `prepare` returned."""

    def __init__(self, tree: ast.Module) -> None:
        self._loaders = prepared_names(tree, -1)
        self._trains = {*training_functions(tree)}

    def is_displayed(self, statement: ast.stmt) -> bool:
        """Whether IPython displays its value, if it is the last one of a cell."""
        if not isinstance(statement, ast.Expr):
            return False
        call = statement.value
        return not (isinstance(call, ast.Call) and self._shows(call))

    def rewritten(
        self, body: list[ast.stmt], *, is_round: bool = False
    ) -> list[ast.stmt]:
        """These statements, with what follows a pass under its condition; `is_round`
        where a loop repeats them. A statement that may have a pass is left alone."""
        made: list[ast.stmt] = []
        lacking, skipped, changed = set[str](), set[str](), set[str]()
        for number, statement in enumerate(body):
            uses, sets = uses_of([statement])
            is_call = is_round and self._is_call(statement)
            if is_call or self._has_pass(statement):
                made.append(self._with_pass(statement, is_call=is_call))
                _, reset = uses_of(body[:number])
                lacking |= sets - (uses - reset)
                changed |= sets
            elif not changed or not self._is_plain(statement):
                made.append(statement)
            elif uses & lacking:
                lacking |= sets
                made.append(only_if("has_batches", statement))
            elif uses & skipped or self._only_shows(statement):
                skipped |= sets
                made.append(only_if("is_there", statement))
            else:
                made.append(in_context(statement) if uses & changed else statement)
        return made

    def _with_pass(self, statement: ast.stmt, *, is_call: bool) -> ast.stmt:
        if is_call:
            return in_context(statement, is_call=True)
        is_round = isinstance(statement, ast.For | ast.While)
        if not self._is_pass(statement):
            for part in ("body", "orelse", "finalbody"):
                if inner := getattr(statement, part, []):
                    made = self.rewritten(inner, is_round=is_round)
                    setattr(statement, part, made)
        return statement

    def _is_pass(self, node: ast.AST) -> bool:
        return isinstance(node, ast.For) and (
            names_in(node.iter, self._loaders) or trains_on_each(node)
        )

    def _has_pass(self, statement: ast.stmt) -> bool:
        return any(
            self._is_pass(each) or (isinstance(each, ast.stmt) and self._is_call(each))
            for each in ast.walk(statement)
        )

    def _is_call(self, statement: ast.stmt) -> bool:
        """Whether it calls a function of the user's with the loader, which may go
        through it."""
        if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign):
            return False
        for each in ast.walk(statement):
            if not isinstance(each, ast.Call) or name_of(each.func) in TAKING:
                continue
            given = [*each.args, *(word.value for word in each.keywords)]
            has_loader = any(getattr(one, "id", "") in self._loaders for one in given)
            if has_loader and not name_of(each.func)[:1].isupper():  # of no class
                return True
        return False

    def _is_plain(self, statement: ast.stmt) -> bool:
        """Whether all that it calls is known, so that there can be no pass in it."""
        calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call)]
        return evaluates(statement) or all(
            self._shows(call)
            or computes(call)
            or (isinstance(call.func, ast.Attribute) and call.func.attr in OF_LIBRARIES)
            or (isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id))
            for call in calls
        )

    def _only_shows(self, statement: ast.stmt) -> bool:
        """Whether it does no more than to show, or to evaluate."""
        if evaluates(statement):
            return True
        if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
            inner = [*statement.body, *getattr(statement, "orelse", [])]
            return all(map(self._only_shows, inner))
        if not isinstance(statement, ast.Expr | ast.Assign):
            return False
        calls = (each for each in ast.walk(statement) if isinstance(each, ast.Call))
        return any(map(self._shows, calls))

    def _shows(self, call: ast.Call) -> bool:
        is_train = isinstance(call.func, ast.Name) and call.func.id == "train"
        return shows(call, self._trains) and not is_train


def in_context(statement: ast.stmt, *, is_call: bool = False) -> ast.stmt:
    """`with __labkit_replay__.tolerating(is_call=...): statement`"""
    keyword = ast.keyword("is_call", ast.Constant(is_call))
    context = ast.withitem(ast.Call(attribute("tolerating"), [], [keyword]))
    return ast.copy_location(ast.With([context], [statement]), statement)


def only_if(condition: str, statement: ast.stmt) -> ast.stmt:
    """`if __labkit_replay__.condition: statement`"""
    made = ast.If(attribute(condition), [statement], [])
    return ast.copy_location(made, statement)


def attribute(name: str) -> ast.expr:
    return ast.Attribute(ast.Name(REPLAY_NAME, ast.Load()), name, ast.Load())


def explain(error: BaseException) -> None:
    """Note under an error what a run that resumes may lack."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, ERRORS) and NO_BATCHES not in notes:
        error.add_note(NO_BATCHES)
