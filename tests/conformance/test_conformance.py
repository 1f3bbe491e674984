"""Every loop under every strategy: right, refused or noted, and as the page says.

A loop is run once under each strategy, each time with another option, so that all
loops take minutes, and not a quarter of an hour; with LABKIT_CONFORMANCE=whole it is
run with each option. `make conformance` does that too, and writes the page.
"""

import contextlib
import math
import os
from collections.abc import Iterator

import pytest

from labkit import Lab

from .document import PAGE
from .document import marks_on_page
from .judge import WITHIN
from .judge import deviation
from .reference import run_plainly
from .table import ACCEPTED
from .table import ALL_STRATEGIES
from .table import LOOPS
from .table import MARKS
from .table import OPTIONS
from .table import ROW
from .table import Place
from .table import code_of
from .table import expected
from .table import run_cells
from .table import runs_in_memory
from .table import untrained
from .table import warm_up

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def warm_lab(shared_lab: Lab) -> Iterator[Lab]:
    with runs_in_memory():
        warm_up(shared_lab)
        yield shared_lab


def places(loop: str) -> list[Place]:
    """Where in its row a loop is run."""
    if os.environ.get("LABKIT_CONFORMANCE") == "whole":
        return ROW
    options, first = list(OPTIONS), list(LOOPS).index(loop)
    return [
        (strategy, options[(first + number) % len(options)])
        for number, strategy in enumerate(ALL_STRATEGIES)
    ]


def loops_on_page() -> list[str]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [line.split(" | ")[0].removeprefix("| ") for line in rows[1:]]


@pytest.mark.parametrize("loop", LOOPS)
def test_loop(warm_lab: Lab, lab: Lab, loop: str) -> None:
    cells = list(run_cells(lab, loop, places(loop)))
    assert not [cell for cell in cells if cell.kind not in ACCEPTED]
    found = {(cell.strategy, cell.option): MARKS[cell.kind] for cell in cells}
    on_page = marks_on_page(loop)
    wanted = {place: on_page[place] for place in found}
    assert found == wanted, "what the page says; make conformance writes it"


def test_the_page_has_every_loop() -> None:
    assert loops_on_page() == list(LOOPS)
    assert len(LOOPS) >= 60


@pytest.mark.parametrize("loop", LOOPS)
def test_a_wrong_loop_would_be_seen(loop: str) -> None:
    """Half of each gradient, or one rank's samples alone, is further off than what
    is taken for right in any precision."""
    right, start = expected(loop, "plain"), untrained(loop)
    found = [deviation(run_plainly(code_of(loop), gradient_scale=0.5), right, start)]
    # Of batches that it cannot cut.
    with contextlib.suppress(ValueError, TypeError, RuntimeError):
        half = run_plainly(code_of(loop), num_shares=2)
        found.append(deviation(half, right, start))
    assert max(d for d in found if math.isfinite(d)) > 2 * max(WITHIN.values())
