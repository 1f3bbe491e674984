"""Runs a cell of a run that resumes up to where the run was.

It runs from its first line, and passes over its data have no batches there. So what
follows a pass has nothing to show, and may lack what a batch would have set.
"""

import ast
import contextlib
import enum
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from labkit.checks import UnsupportedLoopError
from labkit.checks import UserError
from labkit.rank.code.carried import set_by
from labkit.rank.code.carried import shows
from labkit.rank.code.carried import statements_in
from labkit.rank.code.carried import training_functions
from labkit.rank.code.carried import uses_of
from labkit.rank.code.loop_body import evaluates
from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import names_in
from labkit.rank.code.trees import prepared_names
from labkit.rank.code.trees import trains_on_each
from labkit.rank.telemetry.exceptions import safe_str

REPLAY_NAME = "__labkit_replay__"
"""What the cell has a `Replay` by."""
ERRORS = (NameError, ZeroDivisionError)
"""Of what a batch would have set or counted."""
NO_BATCHES = (
    "this run resumes: the cell runs from its first line, and passes over the loader "
    "have no batches up to where the checkpoint was taken. What a batch sets or counts "
    "is not there after them: set it before the loop; or have the loop in the "
    "%%dist_train cell itself, where a statement that lacks it is left out"
)
FAILED = (
    "nothing was left to train, and a statement that follows the loop failed: "
    "{kind}: {text}"
)
TAKING = {"enumerate", "iter", "len", "list", "next", "print", "tqdm", "zip"}
"""Functions of a loader that go through no whole pass by themselves."""

LEFT_ALONE = (
    ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.ClassDef
    | ast.Global
    | ast.Import
    | ast.ImportFrom
    | ast.Nonlocal
)


class Place(enum.Enum):
    """Where a statement is that may lack what a batch sets."""

    AFTER = "after a pass"
    CALL = "a call of a function that may have one"
    END = "after all of them"


class Replay:
    """For the cell of a run that resumes: rewrites it, as an AST transformer of a
    shell, and has the contexts of what follows its passes.

    Until the loop has a batch, what only shows or evaluates is skipped there, and an
    error ends no more than its statement: it may be of a loss that no batch has given.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        *,
        has_batches: Callable[[], bool],
        num_passes: Callable[[], int],
    ) -> None:
        """`namespace` has the variables of cells; `has_batches()` says whether the loop
        is past where it was, `num_passes()` how many it has begun."""
        self._namespace = namespace
        self._has_batches = has_batches
        self._num_passes = num_passes
        self.error: Exception | None = None
        """The first after all passes."""

    @property
    def is_on(self) -> bool:
        return not self._has_batches()

    @contextlib.contextmanager
    def tolerating(self, place: str) -> Iterator[None]:
        """An error ends no more than what is within it; not one of labkit's, and none
        of a call before it has gone through the loader."""
        num_before = self._num_passes()
        try:
            yield
        except (UnsupportedLoopError, UserError, dist.DistError):
            raise
        except Exception as error:
            is_call = place == Place.CALL.name
            if not self.is_on or (is_call and self._num_passes() == num_before):
                raise
            if place == Place.END.name:
                self.error = self.error or error

    def visit(self, tree: ast.Module) -> ast.Module:
        """The cell, rewritten. Names that its loops set anew for each batch are taken
        out of the namespace: they may be of another run, and not on all ranks."""
        passes = _Passes(tree)
        for name in passes.names_set():
            self._namespace.pop(name, None)
        last = tree.body[-1:]
        has_value = any(map(passes.is_displayed, last))
        body = tree.body[:-1] if has_value else tree.body
        tree.body = passes.tolerated(body, Place.END) + (last if has_value else [])
        return ast.fix_missing_locations(tree)


class _Passes:
    """The passes of a cell over what `prepare` returned."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._loaders = prepared_names(tree, -1)
        self._trains = {*training_functions(tree)}

    def names_set(self) -> set[str]:
        """Those that they set, and that the cell does not use before."""
        found: set[str] = set()
        for each in statements_in(self._tree.body):
            if self._is_pass(each):
                found |= {name for one in statements_in([each]) for name in set_by(one)}
        used, _ = uses_of(self._tree.body)
        return found - used

    def is_displayed(self, statement: ast.stmt) -> bool:
        """Whether IPython displays its value, if it is the last one of a cell."""
        if not isinstance(statement, ast.Expr):
            return False
        call = statement.value
        return not (isinstance(call, ast.Call) and shows(call, self._trains))

    def tolerated(self, body: list[ast.stmt], place: Place) -> list[ast.stmt]:
        """These statements, with what follows a pass in a context of this place."""
        made: list[ast.stmt] = []
        has_passed = False
        for statement in body:
            is_pass, is_call = self._is_pass(statement), self._is_call(statement)
            has_pass = is_pass or is_call or self._has_pass(statement)
            is_after = has_passed and not isinstance(statement, LEFT_ALONE)
            has_passed |= has_pass and not isinstance(statement, LEFT_ALONE)
            if is_call:
                made.append(in_context(statement, Place.CALL))
            elif has_pass:
                made.append(statement if is_pass else self._within(statement, place))
            elif is_after and place is Place.AFTER and self._is_skipped(statement):
                made.append(unless_replayed(statement))
            else:
                made.append(in_context(statement, place) if is_after else statement)
        return made

    def _within(self, statement: ast.stmt, place: Place) -> ast.stmt:
        if isinstance(statement, ast.For | ast.While | LEFT_ALONE):
            place = Place.AFTER
        for part in ("body", "orelse", "finalbody"):
            if inner := getattr(statement, part, []):
                setattr(statement, part, self.tolerated(inner, place))
        return statement

    def _is_pass(self, node: ast.AST) -> bool:
        return isinstance(node, ast.For) and (
            names_in(node.iter, self._loaders) or trains_on_each(node)
        )

    def _has_pass(self, statement: ast.stmt) -> bool:
        return any(map(self._is_pass, ast.walk(statement))) or any(
            self._is_call(each) for each in statements_in([statement])
        )

    def _is_call(self, statement: ast.stmt) -> bool:
        """Whether it calls a function of the user's with the loader, which may go
        through it."""
        if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign):
            return False
        return any(
            isinstance(each, ast.Call)
            and name_of(each.func) not in TAKING
            and any(
                isinstance(given, ast.Name) and given.id in self._loaders
                for given in [*each.args, *(word.value for word in each.keywords)]
            )
            for each in ast.walk(statement)
        )

    def _is_skipped(self, statement: ast.stmt) -> bool:
        """Whether it does no more than to show, or to evaluate."""
        if evaluates(statement):
            return True
        if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
            inner = [*statement.body, *getattr(statement, "orelse", [])]
            return all(map(self._is_skipped, inner))
        if not isinstance(statement, ast.Expr | ast.Assign):
            return False
        calls = (each for each in ast.walk(statement) if isinstance(each, ast.Call))
        return any(shows(each, self._trains) for each in calls)


def in_context(statement: ast.stmt, place: Place) -> ast.stmt:
    """`with __labkit_replay__.tolerating(place): statement`"""
    method = ast.Attribute(ast.Name(REPLAY_NAME, ast.Load()), "tolerating", ast.Load())
    context = ast.withitem(ast.Call(method, [ast.Constant(place.name)], []))
    return ast.copy_location(ast.With([context], [statement]), statement)


def unless_replayed(statement: ast.stmt) -> ast.stmt:
    """`if not __labkit_replay__.is_on: statement`"""
    is_on = ast.Attribute(ast.Name(REPLAY_NAME, ast.Load()), "is_on", ast.Load())
    test = ast.UnaryOp(ast.Not(), is_on)
    return ast.copy_location(ast.If(test, [statement], []), statement)


def failed(error: Exception) -> str:
    """The note on an error that ended a statement after all passes."""
    return FAILED.format(kind=type(error).__name__, text=safe_str(error))


def explain(error: BaseException) -> None:
    """Note under an error what a run that resumes may lack."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, ERRORS) and NO_BATCHES not in notes:
        error.add_note(NO_BATCHES)
