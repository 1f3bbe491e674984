"""Trouble with a host or its link: what ends, and what goes on after it."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import namespaces
import pytest
from kernels import wait_until
from namespaces import LIMIT_S
from namespaces import Namespace
from training import mean_losses
from training import training_cell

from labkit import Lab
from labkit import RankError
from labkit.checks import UserError

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("nothing_left"),
]

HOSTS = "lk1:1,lk2:1,lk4:1"
LOOP = """
import time
until = time.monotonic() + 5
is_over, num_turns = torch.zeros(1), 0
while not is_over:
    is_over = torch.tensor([float(time.monotonic() > until)])
    dist.all_reduce(is_over)
    num_turns += 1
"""
LARGE = {"num_features": 64, "num_hidden": 512, "num_samples": 480}


@pytest.fixture
def last(four: list[Namespace], nothing_left: None) -> Iterator[Namespace]:
    """A host whose link is as it should be afterwards."""
    yield four[3]
    four[3].set_wire()
    four[3].set_link("up")
    four[3].end_sessions()


@pytest.fixture
def private(last: Namespace, folder: Path) -> Iterator[Path]:
    """The disk for temporary files of that host, of which nothing is left."""
    place = folder / namespaces.PRIVATE
    yield place
    for each in last.files(place, "full"):
        each.unlink()
    wait_until(lambda: not last.files(place, "labkit-*"), LIMIT_S, "a folder is left")


def soon(fault: Callable[[], None]) -> threading.Timer:
    """Causes it in a cell that has just begun."""
    timer = threading.Timer(1, fault)
    timer.start()
    return timer


SLOW = [{"delay_s": 0.2}, {"bytes_per_s": 1.25e6}]


@pytest.mark.release
@pytest.mark.parametrize("wire", SLOW, ids=["200 ms", "10 Mbit a second"])
def test_a_slow_link_costs_time_alone(last: Namespace, wire: dict[str, float]) -> None:
    cell = training_cell(**LARGE)
    with Lab(launcher="ssh", hosts=HOSTS) as lab, Lab(num_ranks=3) as here:
        last.set_wire(**wire)
        lab.run(LOOP)
        runs = [each.train("ddp", cell, live=False) for each in (lab, here)]
        found, expected = (mean_losses(run) for run in runs)
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("private")
def test_a_link_that_is_cut_for_good(last: Namespace) -> None:
    with Lab(launcher="ssh", hosts=HOSTS) as lab:
        lab.run("kept = rank")
        timer = soon(partial(last.set_link, "down"))
        with pytest.raises(RankError, match=r"rank 2: .*its host lk4 is gone or cut"):
            lab.run("while True: dist.barrier()", timeout=LIMIT_S)
        timer.join()
        assert list(lab.status()["state"]) == ["idle", "idle", "dead"]
        assert lab.pull("kept", [0, 1]) == [0, 1]
        with pytest.raises(UserError, match=r"lk4: ssh: connect to host .* timed out"):
            lab.restart()
        assert lab.pull("kept", [0, 1]) == [0, 1]
    # The agent hears nothing, and ends what it has.
    wait_until(
        lambda: not [each for each in last.programs() if "labkit" in each],
        LIMIT_S,
        "ranks wait for ever",
    )


@pytest.mark.release
def test_half_of_the_packets_are_lost(last: Namespace) -> None:
    """TCP gets something through now and then: ranks may be taken for dead or not."""
    with Lab(launcher="ssh", hosts=HOSTS) as lab:
        lab.run("kept = rank")
        timer = soon(partial(last.set_wire, loss=0.5))
        try:
            lab.run(LOOP, timeout=2 * LIMIT_S)
        except RankError as error:
            assert "lk4" in str(error)  # noqa: PT017 - it may be raised or not
        timer.join()
        last.set_wire()
        dead = lab.restart()
        assert dead in ([], [2])
        lab.run("dist.barrier()\nhas = 'kept' in globals()")
        assert lab.pull("has", "all") == [True, True, not dead]


def test_an_sshd_that_refuses_is_named(three: list[Namespace], folder: Path) -> None:
    keys, away = folder / "user-key.pub", folder / "user-key.away"
    with Lab(launcher="ssh", hosts="lk1:1,lk2:1") as lab:
        keys.rename(away)
        try:
            with pytest.raises(UserError, match=r"lk3: ssh failed .*Permission denied"):
                Lab(launcher="ssh", hosts="lk3:2")
            with pytest.raises(RankError, match=r"rank 1: .*SIGKILL"):
                lab.run("import os\nif rank == 1: os.kill(os.getpid(), 9)")
            assert lab.restart() == [1], "the agent is there, and forks another"
            lab.run("dist.barrier()")
        finally:
            away.rename(keys)


FILLS = """
import os, tempfile
if rank == 2:
    with open(os.path.join(tempfile.gettempdir(), "full"), "wb", 0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError as error:
            found = str(error)
"""


@pytest.mark.release
@pytest.mark.usefixtures("private")
def test_a_host_whose_disk_becomes_full() -> None:
    with Lab(launcher="ssh", hosts=HOSTS) as lab:
        lab.run(FILLS)
        assert "No space left" in lab.pull("found", 2)
        run = lab.train("ddp", training_cell(**LARGE), live=False)
        assert run.num_steps == 40
        with pytest.raises(RankError, match="No space left on device"):
            lab.run(
                "if rank == 2:\n    with open(file.name, 'ab', 0) as more:\n"
                "        more.write(bytes(2**20))\nelse: dist.barrier()"
            )
        with pytest.raises(RankError, match=r"rank 2: .*SIGKILL"):
            lab.run("if rank == 2: os.kill(os.getpid(), 9)")
        assert lab.restart() == [2]
        lab.run("dist.barrier()")


@pytest.mark.usefixtures("four")
def test_a_host_whose_disk_is_full(last: Namespace, private: Path) -> None:
    with (
        (last.place(private) / "full").open("wb", 0) as file,
        contextlib.suppress(OSError),
    ):
        while True:
            file.write(bytes(2**16))
    with pytest.raises(UserError, match=r"lk4: .*No space left on device: /.*labkit-"):
        Lab(launcher="ssh", hosts=HOSTS)


@pytest.mark.parametrize(
    "comes_back", [True, pytest.param(False, marks=pytest.mark.release)]
)
def test_elastic_goes_on_when_a_host_is_back(
    last: Namespace, folder: Path, tmp_path: Path, comes_back: bool
) -> None:
    shared = folder / tmp_path.name
    cell = training_cell(**LARGE, pause_s=0.1)
    with Lab(launcher="ssh", hosts=HOSTS) as lab:

        def die() -> None:
            last.die()
            if comes_back:
                last.set_link("up")

        def when_begun() -> None:
            wait_until(lambda: [*shared.glob("step-*")], LIMIT_S, "no checkpoint")
            die()

        breaks = threading.Thread(target=when_begun)
        breaks.start()
        options = {"elastic": True, "checkpoint": shared, "every": 5, "live": False}
        if comes_back:
            run = lab.train("fsdp", cell, **options)
            assert run.num_steps == 40
            assert len(run.restarts) == 1
        else:
            with pytest.raises(RankError, match=r"rank 2: .*lk4"):
                lab.train("fsdp", cell, **options)
            assert list(lab.status()["state"]) == ["idle", "idle", "dead"]
        breaks.join()
