"""The waits of labkit: each ends before the one that it is within."""

import re
from pathlib import Path

import pytest

import labkit
from labkit import timeouts


@pytest.mark.parametrize(("shorter", "longer", "why"), timeouts.ORDER)
def test_a_wait_outlasts_those_within_it(shorter: str, longer: str, why: str) -> None:
    assert getattr(timeouts, shorter) < getattr(timeouts, longer), why


def test_a_rank_that_does_not_answer_is_killed_before_one_that_does() -> None:
    from labkit.notebook.execution.stop_policy import NUM_ASKED

    assert timeouts.ASK_AGAIN_S * NUM_ASKED < timeouts.KILL_AFTER_S


def test_every_wait_is_used() -> None:
    package = Path(labkit.__file__).parent
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    waits = {name for name in vars(timeouts) if name.endswith("_S")}
    assert set(re.findall(r"\btimeouts\.([A-Z_]+_S)\b", text)) == waits
