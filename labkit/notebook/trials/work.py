"""What a trial runs: a cell, or a function, with the parameters that are tried."""

import ast
import inspect
import itertools
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from labkit.checks import check_code

Work = str | Callable[..., Any]
"""A cell's code, or a function."""

CHECKPOINT = "checkpoint"
"""The attribute of a trial with the folder of its checkpoints."""
OWN_FOLDER = "has_own_folder"
"""That which says whether the trial has made this folder."""


def check_work(work: Any, ranges: Mapping[str, Any]) -> bool:
    """Whether the work takes the strategy as a parameter, too. ValueError where it
    does not take what is in the space."""
    if not callable(work):
        check_code(work)
        if work.startswith("%%"):
            raise ValueError(
                "the cell begins with a magic of its own, before which no parameters "
                "can be set; put it into a function, or leave the magic out"
            )
        return True
    signature = inspect.signature(work)
    kinds = [each.kind for each in signature.parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    missing = [
        name
        for name in ranges
        if name not in signature.parameters and name != "strategy"
    ]
    if missing:
        raise ValueError(
            f"{getattr(work, '__name__', 'the function')}{signature} does not take "
            f"{', '.join(missing)}, which the space has; add it to its parameters"
        )
    of_its_own = [
        each.name
        for each in signature.parameters.values()
        if each.kind is not each.VAR_POSITIONAL
        and each.default is each.empty
        and each.name not in (*ranges, "strategy", "rank", "world_size")
    ]
    if of_its_own:
        raise ValueError(
            f"{getattr(work, '__name__', 'the function')}{signature} also takes "
            f"{', '.join(of_its_own)}, which the space does not have; add it to the "
            "space, or give it a default value"
        )
    return "strategy" in signature.parameters


def with_values(code: str, params: Mapping[str, Any]) -> str:
    """The cell with its parameters as variables, in its first line, or that of the last
    import from __future__: what is kept of the run can be run by itself, and a cell's
    lines have their numbers."""
    values = "; ".join(f"{name} = {value!r}" for name, value in params.items())
    if after := end_of_future(code):
        return f"{code[:after]}; {values}{code[after:]}"
    join = "  " if code.startswith("# %%") else "\n"
    return f"{values}{join}{code}"


def end_of_future(code: str) -> int:
    """Where the last import from __future__ ends, before which nothing but a docstring
    may stand; 0 where there is none."""
    after, lines = 0, code.splitlines(keepends=True)
    for number in range(1, len(lines) + 1) if "__future__" in code else ():
        try:
            # Not the whole cell, which may hold magics.
            body = ast.parse("".join(lines[:number])).body
        except SyntaxError:  # in the middle of a statement
            continue
        first = list(itertools.takewhile(comes_first, body))
        for each in first:
            if isinstance(each, ast.ImportFrom):
                row, column = each.end_lineno or 0, each.end_col_offset or 0  # in bytes
                before = lines[row - 1].encode()[:column].decode()
                after = len("".join(lines[: row - 1]) + before)
        if len(first) < len(body):
            break
    return after


def comes_first(statement: ast.stmt) -> bool:
    """Whether it is an import from __future__, or text, as a docstring is."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
