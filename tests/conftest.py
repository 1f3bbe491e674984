"""One real cluster of two ranks, shared by the tests that need no other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import Lab


@pytest.fixture(scope="session")
def shared_lab() -> Iterator[Lab]:
    with Lab(num_ranks=2, group_timeout_s=30) as lab:
        yield lab


@pytest.fixture
def lab(shared_lab: Lab) -> Lab:
    """A lab whose ranks are alive and whose group works, whatever ran before."""
    try:
        shared_lab.restart()
    except RuntimeError:  # one test's failure is not to be that of all after it
        shared_lab.restart(everyone=True)
    return shared_lab


@pytest.fixture
def shared_data() -> Path:
    """The folder with real data beside the project; skips where there is none."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared/data folder beside this checkout")
    return folder
