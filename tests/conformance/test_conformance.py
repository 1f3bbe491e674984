"""Every loop under every strategy: right, refused or noted, and as the page says.

In `make test` every seventh loop is run under one of the strategies, in
`make test-long` the others, each time with another option; `make test-release` has all
strategies, and `make conformance` runs the whole table, and writes the page.
"""

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from marks import long_but

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
from .table import Place
from .table import code_of
from .table import expected
from .table import run_cells
from .table import runs_in_memory
from .table import untrained
from .table import warm_up

pytestmark = pytest.mark.timeout(300)

NUM_STRATEGIES = 1
"""Under which a loop is run each time; in `make test-release` under the others."""


@pytest.fixture(scope="module")
def warm_lab(shared_lab: Lab) -> Iterator[Lab]:
    with runs_in_memory():
        warm_up(shared_lab)
        yield shared_lab


def places(loop: str) -> list[Place]:
    """Each strategy, with an option that differs from loop to loop; those first that
    the loops before it do not have there."""
    options, first = list(OPTIONS), list(LOOPS).index(loop)
    row = [
        (strategy, options[(first + number) % len(options)])
        for number, strategy in enumerate(ALL_STRATEGIES)
    ]
    shift = NUM_STRATEGIES * first % len(row)
    return row[shift:] + row[:shift]


def loops_on_page() -> list[str]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [line.split(" | ")[0].removeprefix("| ") for line in rows[1:]]


@pytest.mark.parametrize("loop", long_but(LOOPS, *list(LOOPS)[::7]))
def test_loop(warm_lab: Lab, lab: Lab, loop: str) -> None:
    check(lab, loop, places(loop)[:NUM_STRATEGIES])


@pytest.mark.release
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_under_other_strategies(warm_lab: Lab, lab: Lab, loop: str) -> None:
    check(lab, loop, places(loop)[NUM_STRATEGIES:])


def check(lab: Lab, loop: str, places: list[Place]) -> None:
    """A loop is accepted in all these places, and there as the page says."""
    if loop == "swa_made_before" and torch.__version__ < "2.10":
        pytest.skip("AveragedModel fails in torch 2.9 where it averages bf16 in fp32")
    cells = list(run_cells(lab, loop, places))
    assert not [cell for cell in cells if cell.kind not in ACCEPTED]
    found = {(cell.strategy, cell.option): MARKS[cell.kind] for cell in cells}
    on_page = marks_on_page(loop)
    wanted = {place: on_page[place] for place in found}
    assert found == wanted, "what the page says; make conformance writes it"


def test_the_page_has_every_loop() -> None:
    assert loops_on_page() == list(LOOPS)
    assert len(LOOPS) >= 60


@pytest.mark.release
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
