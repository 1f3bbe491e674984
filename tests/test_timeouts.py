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


ELSEWHERE = {
    # Refresh periods: nothing is waited for.
    *("INTERVAL_S", "REFRESH_S", "EAGER_S", "KEYFRAME_S", "STATUS_S"),
    "MAX_TIMEOUT_S",  # the largest that a user may give
    "MIN_SECONDS",  # of a run in which a rank may be called slow
}
A_NUMBER = re.compile(
    r"^(_?[A-Z_]+_S|[A-Z_]+_SECONDS) = [\d.]"
    r"|(?:\b(?:sleep|wait|join|result)\(|timeout(?:_s)?(?:: float)? ?= ?)[\d.]*[1-9]",
    re.MULTILINE,
)


def test_no_wait_is_written_elsewhere() -> None:
    package = Path(labkit.__file__).parent
    found = [
        f"{path.relative_to(package)}: {match[0]}"
        for path in package.rglob("*.py")
        # The watchdog imports nothing of labkit's; the self-test causes the failures
        # that its numbers are of, and has the limit of each check beside it; the course
        # makes ranks slow on purpose.
        if path.name not in ("timeouts.py", "watchdog.py")
        if path.parent.name not in ("selftest", "course")
        for match in A_NUMBER.finditer(path.read_text())
        if match[1] not in ELSEWHERE
    ]
    assert found == []
