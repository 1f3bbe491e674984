"""What ran before a run: cells of the notebook and on ranks, and what was pushed."""

import ast
import contextlib
import io
import re
import sys
import tokenize
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from types import ModuleType
from typing import Any

from labkit.notebook.export.names import Names
from labkit.notebook.export.names import names_of
from labkit.notebook.kernel.output import execution_count
from labkit.rank_spec import format_ranks

LONGEST_LITERAL = 2000
"""Characters of a value that is written as it is."""
_NOTEBOOK_LINE = re.compile(r"\s*([%!?]|\w[\w.]*\?{1,2}\s*$)")
_OF_NOTEBOOKS = {"display", "get_ipython", "clear_output"}
_PLOTTING = {"matplotlib", "pylab", "seaborn", "plotly", "IPython", "ipywidgets"}


@dataclass(frozen=True)
class Ran:
    """A cell that ran on ranks."""

    code: str
    number: int
    """Of the notebook's cell."""
    strategy: str | None = None
    """Of a training run."""
    ranks: tuple[int, ...] | None = None
    """Where it ran, if not on all."""


@dataclass(frozen=True)
class Pushed:
    """A variable that was copied from the notebook to ranks."""

    name: str
    text: str | None
    """A statement that makes it; None for what only the notebook's cells make."""
    kind: str
    number: int


@dataclass(frozen=True)
class Before:
    """What had run when a run began."""

    record: Sequence[Ran | Pushed]
    """What ran on ranks, and will."""
    num_before: int
    """How much of it had, then."""
    number: int
    """Of the notebook's cell that began the run."""
    function: str | None = None
    """The name of what was run, where that is a function."""
    module: str = "__main__"
    """Where that is defined."""
    takes_rank: bool = False

    @property
    def on_ranks(self) -> Sequence[Ran | Pushed]:
        return self.record[: self.num_before]


class Past:
    """What has given the ranks of a lab their variables, for runs that are exported."""

    def __init__(self) -> None:
        self._record: list[Ran | Pushed] = []

    def note_cell(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """A cell runs, on all ranks or on these."""
        where = None if ranks is None else tuple(ranks)
        self._record.append(Ran(code, execution_count(), ranks=where))

    def note_run(
        self, work: Any, strategy: str, ranks: Sequence[int] | None = None
    ) -> Before:
        """A training run of `work` begins, a cell's code or a function, on all ranks or
        on these; what had run before."""
        before = Before(self._record, len(self._record), execution_count())
        if isinstance(work, str):
            where = None if ranks is None else tuple(ranks)
            self._record.append(Ran(work, execution_count(), strategy, where))
        if not callable(work):
            return before
        from labkit.notebook.kernel.pickled_function import takes_rank

        return replace(
            before,
            function=getattr(work, "__name__", type(work).__name__),
            module=getattr(work, "__module__", "__main__"),
            takes_rank=takes_rank(work),
        )

    def note_pushed(self, values: Mapping[str, Any]) -> None:
        """Variables of the notebook are copied to ranks."""
        self._record += [
            pushed(name, value, execution_count()) for name, value in values.items()
        ]


@dataclass(frozen=True)
class Statement:
    """One statement of a cell, with the comments above it."""

    source: str
    node: ast.stmt
    names: Names
    cell: str
    """As "cell 3"."""
    is_training: bool = False
    where: str = ""
    """The ranks that ran it, if not all did."""
    is_pushed: bool = False
    """Whether the notebook's own cells make what it binds."""

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, ast.Import | ast.ImportFrom)

    @property
    def is_definition(self) -> bool:
        return isinstance(
            self.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        )

    @property
    def binds_anew(self) -> bool:
        """Whether what it binds owes nothing to what was there."""
        return (
            self.is_import
            or self.is_definition
            or isinstance(self.node, ast.Assign | ast.AnnAssign)
        )

    @property
    def reads(self) -> frozenset[str]:
        """What it reads before it may have bound that itself: in a loop, or another
        block, what it binds it is taken to have bound."""
        if not hasattr(self.node, "body") or self.is_definition:
            return self.names.needs
        nodes = sorted(
            (node for node in ast.walk(self.node) if isinstance(node, ast.Name)),
            key=lambda node: node.lineno,
        )
        updates = {
            id(node.target)
            for node in ast.walk(self.node)
            if isinstance(node, ast.AugAssign)
        }
        bound: set[str] = set()
        updated: set[str] = set()
        for node in nodes:
            if id(node) in updates and node.id not in bound:
                updated.add(node.id)
            elif isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        return (self.names.needs - self.names.binds) | updated

    @property
    def is_constant(self) -> bool:
        """Whether it gives the same wherever, and however often, it runs."""
        return (
            self.is_import
            or self.is_definition
            or not any(isinstance(node, ast.Call) for node in ast.walk(self.node))
        )


def pushed(name: str, value: Any, number: int) -> Pushed:
    """The note of a variable that is pushed."""
    return Pushed(name, _statement_for(name, value), type(value).__name__, number)


def _statement_for(name: str, value: Any) -> str | None:
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    text = literal(value)
    return None if text is None else f"{name} = {text}"


def literal(value: Any) -> str | None:
    """A small plain value as Python has it; None for any other."""
    if _size_of(value) > LONGEST_LITERAL:
        return None
    text = repr(value)
    try:
        is_same = len(text) <= LONGEST_LITERAL and ast.literal_eval(text) == value
    except (SyntaxError, ValueError):
        return None
    return text if is_same else None


def _size_of(value: Any) -> float:
    """A bound on the characters of a plain value; infinite for another."""
    if isinstance(value, str | bytes):
        return len(value)
    if type(value) in (list, tuple, set, frozenset):
        return 1 + sum(map(_size_of, value)) if len(value) < 1000 else float("inf")
    if type(value) is dict:
        if len(value) >= 1000:
            return float("inf")
        return 1 + sum(_size_of(k) + _size_of(v) for k, v in value.items())
    is_plain = value is None or type(value) in (bool, int, float, complex)
    return 1 if is_plain else float("inf")


def notebook_cells(before: int) -> list[tuple[str, str]]:
    """Name and code of the notebook's cells up to that number; of a script, its own
    code."""
    if "IPython" in sys.modules:
        from IPython import get_ipython

        if (shell := get_ipython()) is not None:
            history = shell.history_manager.input_hist_raw[: before + 1]
            return [
                (f"cell {number}", code)
                for number, code in enumerate(history)
                if code and not code.lstrip().startswith("%%")
            ]
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:
        return []
    try:
        with tokenize.open(path) as file:
            return [(path, file.read())]
    except (OSError, SyntaxError):
        return []


def python_of(code: str, cell: str) -> str:
    """The cell without what only a notebook can run, a comment in its place.

    ValueError where it is no Python then.
    """
    lines = code.splitlines()
    if lines and lines[0].startswith("# %%dist"):
        lines = lines[1:]
    code = "\n".join(lines)
    if not _is_python(code):
        code = "\n".join(
            left_out(line) if _NOTEBOOK_LINE.match(line) else line for line in lines
        )
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        line = code.splitlines()[(error.lineno or 1) - 1].strip() if code else ""
        raise ValueError(
            f"{cell} is not Python that a script could have: {error.msg} at {line!r}; "
            "write it without the notebook's syntax, and run it again"
        ) from None
    return _without_profile(_without_display(_one_statement_a_line(code, tree)))


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def left_out(line: str) -> str:
    """A line as a comment; in a block with what does nothing in its place."""
    indent = line[: len(line) - len(line.lstrip())]
    # In a block it may have been all that there was.
    return f"{indent}{'pass  ' if indent else ''}# left out: {line.strip()}"


def _one_statement_a_line(code: str, tree: ast.Module) -> str:
    """`a; b` in two lines."""
    lines = code.splitlines()
    body = tree.body
    for i in range(len(body) - 1, 0, -1):
        if body[i].lineno == body[i - 1].end_lineno:
            first = i - 1
            while first and body[first].lineno == body[first - 1].end_lineno:
                first -= 1
            begin, end = begin_of(body[first]), body[i].end_lineno or 0
            if any(each.lineno <= end for each in body[i + 1 :]):
                continue  # a part of a longer line, whose turn has been
            lines[begin - 1 : end] = [ast.unparse(e) for e in body[first : i + 1]]
    return "\n".join(lines)


def _without_display(code: str) -> str:
    """Without statements that show something under a cell."""
    tree = ast.parse(code)
    shown = set(_OF_NOTEBOOKS)
    for node in tree.body:
        match node:
            case ast.Import(names=names):
                shown |= {
                    (each.asname or each.name).split(".")[0]
                    for each in names
                    if each.name.split(".")[0] in _PLOTTING
                }
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in _PLOTTING:
                    shown |= {each.asname or each.name for each in names}
    lines = code.splitlines()
    kept: set[str] = set()
    spans: list[tuple[int, int]] = []
    last = tree.body[-1] if tree.body else None
    for node in tree.body:
        begin, end = begin_of(node), node.end_lineno or 0
        own = names_of("\n".join(lines[begin - 1 : end]))
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if is_import and own.binds and own.binds <= shown:
            spans.append((begin, end))
        elif isinstance(node, ast.Assign | ast.Expr) and own.needs & shown:
            shown |= own.binds
            spans.append((begin, end))
        elif node is last and isinstance(node, ast.Expr) and not _calls(node):
            spans.append((begin, end))  # the value of the cell
        else:
            kept |= own.all_needs
    if kept & shown:  # what is plotted is used on
        return code
    for begin, end in reversed(spans):
        lines[begin - 1 : end] = [
            f"# left out: {each}" for each in lines[begin - 1 : end]
        ]
    return "\n".join(lines)


def _without_profile(code: str) -> str:
    """The blocks of `with profile():` as they are, unrecorded."""
    if "profile" in names_of(code).binds:
        return code  # it is another, as torch.profiler's
    lines = code.splitlines()
    is_found = False
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.With):
            continue
        kept = [each for each in node.items if not _is_profile(each.context_expr)]
        if len(kept) == len(node.items) or node.body[0].lineno == node.lineno:
            continue
        is_found = True
        others = ", ".join(map(ast.unparse, kept)) or "contextlib.nullcontext()"
        end = node.items[-1].context_expr.end_lineno or node.lineno
        header = f"{' ' * node.col_offset}with {others}:  # left out: profile()"
        # As many lines as there were, for those of the blocks within it.
        lines[node.lineno - 1 : end] = [header, *[""] * (end - node.lineno)]
    text = "\n".join(lines)
    return f"import contextlib\n{text}" if is_found else text


def _is_profile(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="profile")):
            return True
    return False


def _calls(node: ast.AST) -> bool:
    kinds = ast.Call | ast.Await | ast.NamedExpr | ast.Constant
    return any(isinstance(each, kinds) for each in ast.walk(node))


def begin_of(node: ast.stmt) -> int:
    """The line that a statement begins in, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min(node.lineno, *(each.lineno for each in decorators), node.lineno)


def span_of(node: ast.stmt, lines: Sequence[str]) -> tuple[int, int]:
    """First and last line of a statement with the comments right above it."""
    begin = begin_of(node)
    while begin > 1 and lines[begin - 2].startswith("#"):
        if lines[begin - 2].startswith("# left out: "):
            break
        begin -= 1
    return begin, node.end_lineno or begin


def on_ranks(record: Sequence[Ran | Pushed]) -> list[Statement]:
    """The statements that ran on ranks, those that make what was pushed among them."""
    found: list[Statement] = []
    for each in record:
        cell = f"cell {each.number}"
        if isinstance(each, Pushed):
            made = statements_of(each.text or f"{each.name} = ...", cell)
            found += [replace(one, is_pushed=each.text is None) for one in made]
            continue
        where = "" if each.ranks is None else format_ranks(each.ranks)
        is_training = each.strategy is not None
        # A cell that is no Python did not run, or nothing is needed of it.
        with contextlib.suppress(ValueError):
            found += statements_of(
                python_of(each.code, cell), cell, is_training=is_training, where=where
            )
    return found


def in_notebook(before: int) -> list[Statement]:
    """The statements of the notebook's cells up to that number."""
    found: list[Statement] = []
    for cell, code in notebook_cells(before):
        with contextlib.suppress(ValueError):
            found += statements_of(python_of(code, cell), cell)
    return found


def statements_of(
    code: str, cell: str, *, is_training: bool = False, where: str = ""
) -> list[Statement]:
    """The statements of Python code at its top level."""
    lines = code.splitlines()
    found = []
    for node in ast.parse(code).body:
        begin, end = span_of(node, lines)
        source = "\n".join(lines[begin - 1 : end])
        found.append(
            Statement(source, node, names_of(source), cell, is_training, where)
        )
    return found


def indented(code: str) -> str:
    """The code in a block, strings of several lines as they are."""
    within: set[int] = set()
    depth: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            depth.append(token.start[0])
        elif kind == "FSTRING_END":
            within |= set(range(depth.pop() + 1, token.end[0] + 1))
        elif kind == "STRING":
            within |= set(range(token.start[0] + 1, token.end[0] + 1))
    return "\n".join(
        line if number in within or not line else f"    {line}"
        for number, line in enumerate(code.splitlines(), 1)
    )
