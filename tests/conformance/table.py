"""The loops of `loops/`, each under every strategy and option, as one table."""

import contextlib
import functools
import io
import os
import tempfile
import time
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from labkit import Lab
from labkit import RankError
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.runs.persistence import FOLDER_VARIABLE
from labkit.strategies import STRATEGIES

from .judge import WITHIN
from .judge import deviation
from .judge import is_refusal
from .judge import is_same_error
from .judge import what_was_said
from .reference import run_plainly

LOOPS = {
    file.stem: file for file in sorted((Path(__file__).parent / "loops").glob("*.py"))
}
ALL_STRATEGIES = [name for name, each in STRATEGIES.items() if each.technique]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "bf16": {"precision": "bf16"},
    "clip": {"clip": 0.2},
}
IN_BF16 = ("user_autocast",)
"""Loops that compute in bf16 whatever the option."""
CONFIGS = {
    # Parameters as small as a loop's are else kept whole on every rank.
    "zero3": {"zero_optimization": {"stage3_param_persistence_threshold": 10}},
}
TIMEOUT_S = 30.0
"""Of one run: a hang is named, and does not stop the rest."""

KEEP = """
torch.save(
    torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), result),
    f"{folder}/{{rank}}.pt",
)
"""

FREEZE = """
from labkit.rank.group.recovery import freeze_libraries

freeze_libraries()
"""

MARKS = {
    "right": "✓",
    "refused": "r",
    "noted": "n",
    "WRONG": "W",
    "BROKEN": "B",
    "HANG": "H",
}
ACCEPTED = ("right", "refused", "noted")

Place = tuple[str, str]
"""A strategy and an option: a place in a row of the table."""
ROW = [(strategy, option) for strategy in ALL_STRATEGIES for option in OPTIONS]


@dataclass(frozen=True)
class Cell:
    """How one loop ended under one strategy with one option."""

    loop: str
    strategy: str
    option: str
    kind: str
    """One of `MARKS`."""
    said: str = ""
    """The refusal, the notes or the error; or by how much the result is wrong."""
    where: str = ""
    """The line of an error."""
    deviation: float = float("nan")
    seconds: float = 0.0


def code_of(loop: str) -> str:
    return LOOPS[loop].read_text()


@functools.cache
def expected(loop: str, option: str) -> Any:
    """What one process gives: a result, or an exception."""
    try:
        return run_plainly(code_of(loop), clip=OPTIONS[option].get("clip"))
    except Exception as error:
        return error


@functools.cache
def untrained(loop: str) -> Any:
    """The result where no gradient ever changes anything."""
    return run_plainly(code_of(loop), gradient_scale=0.0)


def run_cell(lab: Lab, loop: str, strategy: str, option: str) -> Cell:
    """Run a loop on the ranks of `lab`, and judge its result."""
    options, wanted = OPTIONS[option], expected(loop, option)
    ended = functools.partial(Cell, loop, strategy, option)
    began = time.monotonic()
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        code = code_of(loop) + KEEP.format(folder=folder)
        try:
            with (
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(printed),
            ):
                run = lab.train(
                    strategy,
                    code,
                    live=False,
                    timeout=TIMEOUT_S,
                    hang_after=0,
                    config=CONFIGS.get(strategy),
                    **options,
                )
        except RankError as error:
            is_known = is_refusal(error) or is_same_error(error, wanted)
            said, where = what_was_said(error)
            return ended("refused" if is_known else "BROKEN", said, where=where)
        except CellTimeoutError as error:
            return ended("HANG", " ".join(str(error).split()))
        except ValueError as error:
            return ended("refused", f"ValueError: {error}")
        seconds = time.monotonic() - began
        results = [torch.load(file) for file in sorted(Path(folder).iterdir())]
    away = max(deviation(result, wanted, untrained(loop)) for result in results)
    differences = [*filter(says_it_differs, run.notes), *run.mismatches]
    ended = functools.partial(ended, deviation=away, seconds=seconds)
    precision = "bf16" if loop in IN_BF16 else options.get("precision", "fp32")
    if away <= WITHIN[precision]:
        return ended("right", " ".join([*run.notes, *run.mismatches]))
    if differences:
        return ended("noted", " ".join(differences))
    return ended("WRONG", f"{away:.2g} of what training moved it")


def says_it_differs(note: str) -> bool:
    """Whether a note is about the result, and not about what it costs."""
    return "one process" in note


def run_cells(lab: Lab, loop: str, places: Iterable[Place]) -> Iterator[Cell]:
    """A loop at these places of its row of the table."""
    for strategy, option in places:
        cell = run_cell(lab, loop, strategy, option)
        if cell.kind in ("BROKEN", "HANG"):
            with contextlib.redirect_stderr(io.StringIO()):
                mend(lab)
        yield cell


def mend(lab: Lab) -> None:
    """Have all ranks alive, and in a group that works, for the next loop."""
    try:
        lab.restart()
    except RuntimeError:
        lab.restart(everyone=True)


@contextlib.contextmanager
def runs_in_memory() -> Iterator[None]:
    """Keep the folders of runs where writing to disk need not be waited for."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        mock.patch.dict(os.environ, {FOLDER_VARIABLE: folder}),
    ):
        yield


def warm_up(lab: Lab) -> None:
    """Have all libraries loaded, and out of the garbage collector's sight.

    It runs after every cell, and would look at all that they made: most of the time
    that so short a run takes.
    """
    for strategy in ALL_STRATEGIES:
        run_cell(lab, "plain", strategy, "plain")
    lab.run(FREEZE)


def row(loop: str, cells: Iterable[Cell]) -> str:
    """One line of the table: a mark for each option, by strategy."""
    marks: dict[str, str] = {}
    for cell in cells:
        marks[cell.strategy] = marks.get(cell.strategy, "") + MARKS[cell.kind]
    return "| " + " | ".join([loop, *marks.values()]) + " |"
