"""Code that was written as a script, by somebody else: what it leaves on a rank is put
right, and what it says is heard."""

import pytest

from labkit import Lab

pytestmark = pytest.mark.timeout(120)

Captured = pytest.CaptureFixture[str]

LAUNCHED = """
import os
import sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
launched = {name: os.environ.get(name) for name in [*names, "MASTER_PORT"]}
"""


# ---- the environment ----


def test_what_a_launcher_sets_is_whole_after_every_cell(lab: Lab) -> None:
    lab.run(LAUNCHED)
    before = lab.pull("launched", "all")
    for rank, launched in enumerate(before):
        assert launched == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": before[0]["MASTER_PORT"],
        }
    lab.run("del os.environ['WORLD_SIZE']\nos.environ['MASTER_PORT'] = '29500'")
    lab.run(LAUNCHED)
    assert lab.pull("launched", "all") == before


def test_single_is_launched_as_one_rank(lab: Lab) -> None:
    lab.train("single", LAUNCHED, live=False)
    assert lab.pull("launched")["WORLD_SIZE"] == "1"
    lab.run(LAUNCHED)
    assert lab.pull("launched")["WORLD_SIZE"] == "2"


def test_a_rank_does_not_look_as_if_somebody_typed(lab: Lab) -> None:
    """Lightning refuses to train under strategies that it says are for scripts."""
    lab.run("import sys\nhas_prompt = hasattr(sys, 'ps1')")
    assert lab.pull("has_prompt", "all") == [False, False]
