"""Every loop under every strategy: right, refused or noted, and as the page says."""

import contextlib
import math

import pytest

from labkit import Lab

from .document import PAGE
from .judge import WITHIN
from .judge import deviation
from .reference import run_plainly
from .table import ACCEPTED
from .table import LOOPS
from .table import code_of
from .table import expected
from .table import row
from .table import run_cells
from .table import untrained

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("loop", LOOPS)
def test_loop(lab: Lab, loop: str) -> None:
    cells = list(run_cells(lab, [loop]))
    assert [cell for cell in cells if cell.kind not in ACCEPTED] == []
    # What was right is not to be refused: `make conformance` writes the page anew.
    assert row(loop, cells) in PAGE.read_text().splitlines()


def test_the_page_has_these_loops_and_no_others() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows[1:]] == list(LOOPS)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_wrong_loop_would_be_seen(loop: str) -> None:
    """Half of each gradient, or one rank's samples alone, is further off than what
    is taken for right in any precision."""
    right, start = expected(loop, "plain"), untrained(loop)
    found = [deviation(run_plainly(code_of(loop), gradient_scale=0.5), right, start)]
    with contextlib.suppress(ValueError, TypeError):  # batches it cannot cut
        half = run_plainly(code_of(loop), num_shares=2)
        found.append(deviation(half, right, start))
    assert max(d for d in found if math.isfinite(d)) > 1.25 * max(WITHIN.values())
