"""Faults thrown at one lab: the short form of benchmarks/chaos.py."""

import chaos
import pytest

SEED = 0
KINDS = (
    "raise",
    "mismatch, interrupt",
    "loop, interrupt",
    "sleep, --timeout",
    "painter killed",
    "DataLoader worker killed",
    "SIGKILL",
    "GIL held, two interrupts",
)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_session_survives_whatever_is_thrown_at_it() -> None:
    kinds = {kind.name: kind for kind in chaos.KINDS}
    faults = [
        chaos.draw(SEED, number, 2, kinds=[kinds[name]], strategies=["ddp", "fsdp"])
        for number, name in enumerate(KINDS)
    ]
    for outcome in chaos.throw_all(faults, num_ranks=2):
        assert not outcome.wrong, outcome
