"""The self-test, as a user runs it: on one rank, and on two over each backend."""

import pytest

import labkit
from labkit.selftest.report import FAILED

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("num_ranks", "backend"), [(1, "nccl"), (2, "nccl"), (2, "gloo")]
)
def test_nothing_fails(num_ranks: int, backend: str) -> None:
    report = labkit.check(num_ranks, backend=backend, device="cuda", output=None)
    print(report)
    assert not [line for line in report.lines if line.state == FAILED]
    assert report.is_right
