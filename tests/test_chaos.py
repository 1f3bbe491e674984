"""Faults thrown at one lab: the short form of benchmarks/chaos.py."""

from collections.abc import Sequence

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
    assert_survives([kinds[name] for name in KINDS], ["ddp", "fsdp"], num_ranks=2)


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_session_with_servers_survives_it_as_well() -> None:
    assert_survives(chaos.KINDS, ["parameter_server"], num_ranks=3)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_session_with_parts_of_a_model_survives_it_as_well() -> None:
    kinds = {kind.name: kind for kind in chaos.KINDS}
    chosen = [kinds[name] for name in KINDS]
    assert_survives(chosen, ["tensor", "pipeline"], num_ranks=2)


def assert_survives(
    kinds: Sequence[chaos.Kind], strategies: Sequence[str], num_ranks: int
) -> None:
    faults = [
        chaos.draw(SEED, number, num_ranks, kinds=[kind], strategies=strategies)
        for number, kind in enumerate(kinds)
    ]
    for outcome in chaos.throw_all(faults, num_ranks=num_ranks):
        assert not outcome.wrong, outcome
