"""Whether two results are the same, and how an error is to be taken."""

import math
import re
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from labkit import RankError
from labkit.rank.engine.hints import HINTS
from labkit.rank.engine.hints import NO_GRADIENT
from labkit.rank.engine.hints import OF_ACCUMULATION
from labkit.rank.engine.hints import OF_STRATEGIES

WITHIN = {"fp32": 1e-3, "bf16": 0.1}
"""How far a result may be from the reference's, which is in fp32, as a part of how far
training moved it.

The rounding of bf16 was measured to make up to 0.03 of it in these loops. Half of each
gradient, or one rank's samples alone, make 0.25 and more."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"^File (\S+?):\d+", re.MULTILINE)


def deviation(result: Any, expected: Any, start: Any) -> float:
    """How far `result` is from `expected`, as a part of how far that is from `start`,
    what it was before training; infinite where it is of another kind.

    Numbers that are no tensors, as a learning rate, must be equal.
    """
    if isinstance(expected, Exception):
        return math.inf
    found, wanted, before = map(tree_leaves, (result, expected, start))
    if len(found) != len(wanted):
        return math.inf
    error = moved = 0.0
    for one, other, first in zip(found, wanted, before, strict=True):
        if isinstance(other, torch.Tensor):
            if not isinstance(one, torch.Tensor) or one.shape != other.shape:
                return math.inf
            error += (one.double() - other.double()).square().sum().item()
            moved += (other.double() - first.double()).square().sum().item()
        elif not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9):
            return math.inf
    if not math.isfinite(error):
        return math.inf
    return math.sqrt(error / moved)


def is_refusal(error: RankError) -> bool:
    """Whether labkit itself said what to write instead: in an error of its own, or
    under one of a library's."""
    [first] = [each for each in error.outcomes if each.rank == error.rank]
    if first.ename in ("UnsupportedLoopError", "UnsupportedMethodError"):
        return True
    tables = HINTS, OF_STRATEGIES, OF_ACCUMULATION
    hints = [NO_GRADIENT, *(hint for table in tables for hint in table.values())]
    if any(hint in first.evalue for hint in hints):
        return True
    if first.ename != "ValueError":
        return False
    frames = _FRAME.findall(_ANSI.sub("", "\n".join(first.traceback)))
    # A refusal ends at the line of the loop, what a library raises in its own file.
    return not frames


def is_same_error(error: RankError, wanted: Any) -> bool:
    """Whether one process ends with the same error, which is then the loop's own."""
    [first] = [each for each in error.outcomes if each.rank == error.rank]
    return isinstance(wanted, Exception) and first.ename == type(wanted).__name__


def what_was_said(error: RankError) -> tuple[str, str]:
    """The error of the rank that failed first, in one line; and where that was."""
    [first] = [each for each in error.outcomes if each.rank == error.rank]
    return f"{first.ename}: {' '.join(first.evalue.split())}", first.where
