"""Runs a cell of a run that resumes up to where the run was.

It runs from its first line, and passes over its data have no batches there. So what
follows a pass has nothing to show, and may lack what a batch would have set.
"""

import __future__

import ast
import builtins
import contextlib
import inspect
import re
import textwrap
import traceback
from collections.abc import Callable
from collections.abc import Iterator
from types import CodeType
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from labkit.checks import UnsupportedLoopError
from labkit.checks import UserError
from labkit.rank.code.carried import ENDING
from labkit.rank.code.carried import FUNCTIONS
from labkit.rank.code.carried import RECORDS
from labkit.rank.code.carried import SETTING
from labkit.rank.code.carried import cases_of
from labkit.rank.code.carried import changed_by
from labkit.rank.code.carried import computes
from labkit.rank.code.carried import may_train
from labkit.rank.code.carried import set_by
from labkit.rank.code.carried import shows
from labkit.rank.code.carried import statements_in
from labkit.rank.code.carried import training_functions
from labkit.rank.code.carried import used_names
from labkit.rank.code.carried import uses_of
from labkit.rank.code.loop_body import evaluates
from labkit.rank.code.trees import line_of
from labkit.rank.code.trees import name_of
from labkit.rank.code.trees import names_in
from labkit.rank.code.trees import prepared_names
from labkit.rank.code.trees import trains_on_each
from labkit.rank.training.session import Session
from labkit.rank.training.whole_text import is_of_library

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
LEFT_OUT = (
    "{use}: this run resumes at the end of a pass over the loader. This line follows "
    "the pass and needs what a batch sets or counts, so it was left out there, where "
    "one process does it, with what depends on it: training may go on otherwise. To "
    "have it done, remove this checkpoint, to resume from the one before; or save at "
    "other steps than the last of a pass, by --every"
)
NO_NEXT = (
    "this run resumes: the cell runs from its first line, and passes over the loader "
    "have no batches up to where the checkpoint was taken, so next() has none. Take a "
    "batch that is only looked at of loader.dataset; take those that the loop trains "
    "on by for, or begin the next pass in except StopIteration:"
)
TAKING = {"enumerate", "iter", "len", "list", "next", "prepare", "print", "tqdm", "zip"}
"""Functions of a loader that go through no whole pass by themselves."""
OF_LIBRARIES = {
    name
    for kind in (torch.Tensor, nn.Module, LRScheduler, dict, list, str)
    for name in dir(kind)
} | {"close", "copy", "deepcopy", "isfinite", "isinf", "isnan", "sqrt"}
"""Methods that go through no loader."""
SHOWS = re.compile(
    r"print|log|info|debug|warn|write|plot|save|show|display|scalar|eval|valid|test",
    re.IGNORECASE,
)
"""In the name of a function that changes nothing by which a loop goes on: fewer than
show, as an `update`, or a `generate`, may be of the data."""
LOOPS = ast.For | ast.AsyncFor | ast.While
EXPRESSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"}
"""Names of code that has no statements."""
EVALUATES = re.compile(r"eval|valid|test", re.IGNORECASE)


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
        note: Callable[[str], None],
    ) -> None:
        """`is_before()` says whether the loop has not come to where the run was,
        `has_batches()` whether it has had one since, or asked for one, and
        `num_passes()` how many passes it has begun; `note(text)` takes a sentence for
        the user."""
        self._is_before = is_before
        self._has_batches = has_batches
        self._num_passes = num_passes
        self._note = note
        self._has_noted = False
        self._was_there = False
        """Whether it was, as a pass without batches ended before."""

    @property
    def is_there(self) -> bool:
        """Whether the loop is where the run was."""
        return not self._is_before()

    @property
    def has_batches(self) -> bool:
        """Whether it has had a batch."""
        return self._has_batches()

    def has_batches_for(self, use: str) -> bool:
        """The same, before a line by which the loop trains: the first that is left out
        where the loop is where the run was is noted."""
        if not self.has_batches and self.is_there and not self._has_noted:
            self._has_noted = True
            self._note(LEFT_OUT.format(use=use))
        return self.has_batches

    @property
    def asks_again(self) -> bool:
        """Whether a pass that has no batch may be followed by one that has: also the
        one in which the run was may have none left."""
        was_there, self._was_there = self._was_there, self.is_there
        return not self.has_batches and not was_there

    @contextlib.contextmanager
    def tolerating(self, use: str = "", *, is_call: bool) -> Iterator[None]:
        """An error because there was no batch ends no more than what is within it; not
        one of labkit's, and none of a call that has not gone through the loader yet, or
        that would train on. `use` is a line by which the loop trains."""
        num_before = self._num_passes()
        try:
            yield
        except (UnsupportedLoopError, UserError, dist.DistError):
            raise
        except Exception as error:
            if self.has_batches or (is_call and self._num_passes() == num_before):
                raise
            if is_call and ends_training(error):
                error.add_note(NO_BATCHES)
                raise
            if use:
                self.has_batches_for(use)

    def visit(self, tree: ast.Module) -> ast.Module:
        """The cell, rewritten."""
        passes = _Passes(tree)
        value = [each for each in tree.body[-1:] if passes.is_displayed(each)]
        body = tree.body[: len(tree.body) - len(value)]
        tree.body = [*passes.rewritten(body), *value]
        _NextPasses().visit(tree)
        return ast.fix_missing_locations(tree)

    @contextlib.contextmanager
    def of_function(self, function: Any) -> Iterator[Any]:
        """`function`, rewritten as a cell is: itself where its text is not known, or
        where it is not made of that text alone."""
        tree = tree_of_function(function)
        if tree is None:
            yield function
            return
        code = compiled(self.visit(tree), function)
        made = FunctionType(code, function.__globals__, function.__name__)
        made.__defaults__, made.__kwdefaults__ = (
            function.__defaults__,
            function.__kwdefaults__,
        )
        function.__globals__[REPLAY_NAME] = self
        try:
            yield made
        finally:
            function.__globals__.pop(REPLAY_NAME, None)


def tree_of_function(function: Any) -> ast.Module | None:
    """The text of a plain function, with the lines of its file; None where it is none,
    or where the file has changed since."""
    if not inspect.isfunction(function) or function.__closure__:
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return None
    match tree.body:
        case [ast.FunctionDef(decorator_list=[], name=function.__name__)]:
            ast.increment_lineno(tree, first - 1)
        case _:
            return None
    return tree if are_alike(compiled(tree, function), function.__code__) else None


def are_alike(one: CodeType, other: CodeType) -> bool:
    """Whether both do the same, wherever their lines are."""
    if (one.co_code, one.co_names) != (other.co_code, other.co_names):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(
        are_alike(a, b)
        if isinstance(a, CodeType) and isinstance(b, CodeType)
        else repr(a) == repr(b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


def compiled(tree: ast.Module, function: FunctionType) -> CodeType:
    """The code of a function of this text, without a call of what its defaults are."""
    code = function.__code__
    flags = code.co_flags & __future__.annotations.compiler_flag
    module = compile(tree, code.co_filename, "exec", flags, dont_inherit=True)
    return next(
        each
        for each in module.co_consts
        if isinstance(each, CodeType) and each.co_name == function.__name__
    )


def replay_of(session: Session) -> Replay:
    """For the run of a session that resumes."""
    return Replay(
        is_before=lambda: session.is_replaying,
        has_batches=lambda: session.has_begun,
        num_passes=lambda: session.num_passes,
        note=session.note,
    )


class _Passes:
    """The passes of a cell over what `prepare` returned."""

    def __init__(self, tree: ast.Module) -> None:
        self._loaders = prepared_names(tree, -1)
        self._trains = {*training_functions(tree)}
        self._used = used_names(tree)
        self._go_through = callers_of(self._trains, tree)

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
        follows = False
        for number, statement in enumerate(body):
            uses, sets = uses_of([statement])
            sets |= bound_within(statement)
            is_call = is_round and self._is_call(statement)
            if isinstance(statement, FUNCTIONS | ast.ClassDef):
                made.append(self._with_pass(statement, is_call=False))
            elif not evaluates(statement) and (is_call or self._has_pass(statement)):
                made.append(self._with_pass(statement, is_call=is_call))
                _, reset = uses_of(body[:number])
                lacking |= sets - (uses - reset)
                changed |= sets
                follows = True  # also what goes through the loader and sets nothing
            elif not follows or not self._is_plain(statement):
                made.append(statement)
            elif uses & lacking:
                lacking |= sets
                made.append(only_if(self._has_batches(statement), statement))
            elif uses & skipped or self._only_shows(statement):
                skipped |= sets
                lacking -= assigned_by(statement)
                made.append(only_if(attribute("is_there"), statement))
            elif uses & changed:
                made.append(in_context(statement, self._use(statement)))
            else:
                made.append(statement)
                lacking -= assigned_by(statement)
                skipped -= assigned_by(statement)
        return made

    def _has_batches(self, statement: ast.stmt) -> ast.expr:
        if use := self._use(statement):
            return ast.Call(attribute("has_batches_for"), [ast.Constant(use)], [])
        return attribute("has_batches")

    def _use(self, statement: ast.stmt) -> str:
        """Its first line, if the loop trains by what it does; "" otherwise."""
        # What a function returns is lacking where it is called.
        is_return = isinstance(statement, ast.Return)
        if is_return or not self.trains_by([statement]):
            return ""
        return line_of(statement).removesuffix(":")

    def trains_on(self, statement: ast.stmt) -> bool:
        """Whether a function may train on with it."""
        return not self._is_plain(statement) or bool(self._use(statement))

    def trains_by(self, body: list[ast.stmt]) -> bool:
        """Whether these do anything that what follows may train by, or end."""
        for each in statements_in(body):
            names = changed_by(each)
            if isinstance(each, ENDING) or names & self._used:
                return True
            if isinstance(each, SETTING):  # an item, or an attribute
                is_record = any(map(RECORDS.search, names))
                if not is_record and (not names or names != {*set_by(each)}):
                    return True
            if isinstance(each, ast.Expr) and self._may_train(each.value):
                return True
        return False

    def _may_train(self, value: ast.expr) -> bool:
        is_other = isinstance(value, ast.Call) and not computes(value)
        return is_other and may_train(value, self._trains)

    def _with_pass(self, statement: ast.stmt, *, is_call: bool) -> ast.stmt:
        if is_call:
            return in_context(statement, is_call=True)
        is_round = isinstance(statement, ast.For | ast.While)
        if not self._is_pass(statement):
            for part in ("body", "orelse", "finalbody"):
                if inner := getattr(statement, part, []):
                    made = self.rewritten(inner, is_round=is_round)
                    setattr(statement, part, made)
            for each in [*getattr(statement, "handlers", []), *cases_of(statement)]:
                each.body = self.rewritten(each.body)
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
        """Whether it calls a function of the user's that trains, or that has the loader
        and may go through it."""
        if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign):
            return False
        for each in ast.walk(statement):
            if not isinstance(each, ast.Call) or name_of(each.func) in TAKING:
                continue
            if name_of(each.func) in self._go_through:
                return True
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
        names = {
            name_of(each.func)
            for each in ast.walk(statement)
            if isinstance(each, ast.Call) and self._shows(each)
        }
        if self._used.isdisjoint(set_by(statement)):
            return bool(names)
        return any(map(EVALUATES.search, names))

    def _shows(self, call: ast.Call) -> bool:
        return shows(call, self._trains) and bool(SHOWS.search(name_of(call.func)))


def ends_training(error: Exception) -> bool:
    """Whether an error, within a call of the cell's, leaves out anything by which a
    loop trains; or ends a function of which nobody can tell."""
    # Without the frames of `tolerating` and of the cell.
    frames = [*traceback.walk_tb(error.__traceback__)][2:]
    return any(trains_after(frame.f_code, line) for frame, line in frames)


def trains_after(code: CodeType, line: int) -> bool:
    """Whether a function of the user's has yet to train where it fails in this line."""
    if is_of_library(code.co_filename) or code.co_name in EXPRESSIONS:
        return False
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return True
    ast.increment_lineno(tree, max(first - 1, 0))
    passes = _Passes(tree)
    body = (
        tree.body if code.co_name == "<module>" else getattr(tree.body[0], "body", [])
    )
    return any(
        passes.trains_on(each)
        for each in statements_in(body)
        if each.lineno > line
        or (isinstance(each, LOOPS) and each.lineno <= line <= (each.end_lineno or 0))
    )


def bound_within(statement: ast.stmt) -> set[str]:
    """The names that its expressions and patterns set."""
    found = set[str]()
    for each in ast.walk(statement):
        match each:
            case ast.NamedExpr(target=ast.Name(id=name)):
                found.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
    return found


def assigned_by(statement: ast.stmt) -> set[str]:
    """The names that have a value of its whatever they had before."""
    is_one = isinstance(statement, ast.Assign | ast.AnnAssign)
    return {*set_by(statement)} if is_one else set()


class _NextPasses(ast.NodeTransformer):
    """What asks a loader for its next pass where one has ended asks again, until there
    is one that has batches."""

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        self.generic_visit(node)
        is_end = node.type is not None and name_of(node.type) == "StopIteration"
        leaves = any(isinstance(x, ast.Break | ast.Continue) for x in ast.walk(node))
        if is_end and not leaves:
            node.body = [until_it_has_batches(node.body)]
        return node


def until_it_has_batches(body: list[ast.stmt]) -> ast.stmt:
    """Repeat this while there is no batch, and the next pass may have one."""
    [made] = ast.parse(
        "while True:\n"
        "    try:\n"
        "        pass\n"
        "    except StopIteration:\n"
        f"        if not {REPLAY_NAME}.asks_again:\n"
        "            raise\n"
        "    else:\n"
        "        break\n"
    ).body
    made.body[0].body = body  # type: ignore[attr-defined]
    return made


def callers_of(names: set[str], tree: ast.Module) -> set[str]:
    """These functions, and those of the text that call one of them, and so on."""
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    found = {*names}
    for _ in functions:
        found |= {
            function.name
            for function in functions
            for each in ast.walk(function)
            if isinstance(each, ast.Call) and name_of(each.func) in found
        }
    return found


def in_context(
    statement: ast.stmt, use: str = "", *, is_call: bool = False
) -> ast.stmt:
    """`with __labkit_replay__.tolerating(use, is_call=...): statement`"""
    keyword = ast.keyword("is_call", ast.Constant(is_call))
    call = ast.Call(attribute("tolerating"), [ast.Constant(use)], [keyword])
    made = ast.With([ast.withitem(call)], [statement])
    return ast.copy_location(made, statement)


def only_if(condition: ast.expr, statement: ast.stmt) -> ast.stmt:
    """`if condition: statement`"""
    made = ast.If(condition, [statement], [])
    return ast.copy_location(made, statement)


def attribute(name: str) -> ast.expr:
    return ast.Attribute(ast.Name(REPLAY_NAME, ast.Load()), name, ast.Load())


def explain(error: BaseException) -> None:
    """Note under an error what a run that resumes may lack."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, ERRORS) and NO_BATCHES not in notes:
        error.add_note(NO_BATCHES)
    if isinstance(error, StopIteration) and NO_NEXT not in notes:
        error.add_note(NO_NEXT)
