"""Ranks on three hosts: network namespaces with an address and an sshd each."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import namespaces
import psutil
import pytest
from kernels import running_kernel
from kernels import wait_until
from namespaces import LIMIT_S
from namespaces import Namespace
from training import CELL
from training import mean_losses
from training import training_cell

from labkit import Lab
from labkit import RankError
from labkit.checks import UserError
from labkit.notebook.cluster.engines import Cluster

pytestmark = [pytest.mark.hosts, pytest.mark.engine, pytest.mark.timeout(600)]

HOSTS = "lk1:2,lk2:1,lk3:1"


@pytest.fixture(scope="module")
def lab(three: list[Namespace]) -> Iterator[Lab]:
    before = [each.programs() for each in three]
    with Lab(launcher="ssh", hosts=HOSTS) as lab:
        yield lab
    # Agents end a moment after they have said so.
    wait_until(lambda: [each.programs() for each in three] == before, LIMIT_S, "left")


def test_ranks_have_the_places_that_torchrun_gives(lab: Lab) -> None:
    assert lab.hosts == ["lk1", "lk2", "lk3"]
    assert lab.describe() == "4 ranks on the CPU of lk1, lk2, lk3, gloo"
    lab.run(
        "import os\nnames = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE']\n"
        "place = [int(os.environ[name]) for name in names]\n"
        "master = os.environ['MASTER_ADDR']\n"
        "found = torch.ones(1) * rank\ndist.all_reduce(found)\nfound = found.item()"
    )
    assert lab.pull("place", "all") == [
        [0, 0, 4, 2],
        [1, 1, 4, 2],
        [2, 0, 4, 1],
        [3, 0, 4, 1],
    ]
    assert lab.pull("found", "all") == [6.0] * 4
    assert set(lab.pull("master", "all")) == {f"{namespaces.SUBNET}.1"}
    assert list(lab.status()["host"]) == ["lk1", "lk1", "lk2", "lk3"]
    assert set(lab.status()["state"]) == {"idle"}


def test_nothing_of_a_lab_is_open_to_the_network_but_its_group(
    lab: Lab, three: list[Namespace]
) -> None:
    for host in three:
        ports = host.listening()
        assert ports
        addresses = {each.rpartition(":")[0] for each in ports}
        assert addresses <= {"127.0.0.1", host.address}


def test_losses_are_those_of_one_host(lab: Lab) -> None:
    with Lab(num_ranks=4) as here:
        for strategy in ("ddp", "zero2", "fsdp", "hsdp"):
            found, expected = (
                mean_losses(each.train(strategy, CELL, live=False))
                for each in (lab, here)
            )
            assert len(found) == 8
            assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.release
@pytest.mark.usefixtures("nothing_left")
def test_a_host_has_the_whole_model_by_default(
    three: list[Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        Lab(launcher="ssh", hosts="lk1:2,lk2:2") as lab,
        Lab(num_ranks=4) as here,
    ):
        for strategy, mesh in (
            ("hsdp", "dp_replicate=2,dp_shard=2"),
            ("tensor", "dp=2,tp=2"),
        ):
            run = lab.train(strategy, CELL, live=False)
            assert run.options.mesh == mesh
            assert f"--mesh {mesh}, the default on these" in capsys.readouterr().err
            expected = here.train(strategy, CELL, live=False, mesh=mesh)
            assert mean_losses(run) == pytest.approx(mean_losses(expected), rel=1e-6)


def test_large_values_go_to_and_from_every_host(lab: Lab) -> None:
    value = os.urandom(3 * 2**20)
    lab.push(value=value)
    assert lab.pull("value", "all") == [value] * 4


def test_a_rank_that_fails_on_one_host_frees_those_on_others(lab: Lab) -> None:
    lab.run("kept = rank")
    with pytest.raises(RankError, match=r"rank 3: failed .*ZeroDivisionError"):
        lab.run("if rank == 3: 1 / 0\nelse: dist.barrier()")
    lab.run("dist.barrier()")
    assert lab.pull("kept", "all") == [0, 1, 2, 3]


def test_a_rank_that_dies_is_explained_and_brought_back(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run("kept = rank")
    with pytest.raises(RankError, match=r"rank 2: .*killed by SIGKILL"):
        lab.run(
            "import os, signal\nprint('step', rank)\n"
            "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
            "else: dist.barrier()"
        )
    assert "step 2" in capsys.readouterr().out
    assert lab.restart() == [2]
    lab.run("dist.barrier()\nhas = 'kept' in globals()")
    assert lab.pull("has", "all") == [True, True, False, True]


def test_a_rank_that_holds_the_gil_shows_its_stack(lab: Lab) -> None:
    stacks: list[str] = []

    def look() -> None:
        stacks.append(repr(lab.stack()))

    looking = threading.Timer(2, look)
    looking.start()
    lab.run("import re\nif rank == 3: re.match('(a|a)*b', 'a' * 27)")
    looking.join()
    assert "rank 3: does not answer: native code holds the GIL" in stacks[0]
    assert "re.match" in stacks[0] or "line 2" in stacks[0]


def test_a_checkpoint_where_hosts_share_no_folder_is_refused(
    lab: Lab, folder: Path
) -> None:
    place = folder / namespaces.PRIVATE / "checkpoints"
    with pytest.raises(ValueError, match="is not the same folder on lk1, lk2, lk3"):
        lab.train("fsdp", CELL, live=False, checkpoint=place)
    shared = folder / "shared"
    lab.train("fsdp", CELL, live=False, checkpoint=shared, name="kept")
    assert [*shared.iterdir()]


def test_records_come_also_where_hosts_share_no_folder(
    lab: Lab,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(folder / namespaces.PRIVATE / "runs"))
    run = lab.train("ddp", CELL, live=False)
    assert run.num_steps == 8
    assert "is not the same folder on lk1, lk2, lk3" in capsys.readouterr().err


def test_another_version_is_named_by_host(
    three: list[Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "deepspeed-9.9.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: deepspeed\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"deepspeed is \S+ on lk1 and 9.9 here; deep"):
        Lab(launcher="ssh", hosts="lk1:1,lk2:1")


def test_a_host_without_labkit_is_named(
    three: list[Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    # Python of the environment's, without the environment.
    monkeypatch.setattr(sys, "executable", sys._base_executable)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"lk1: labkit cannot be imported with .*same"):
        Lab(launcher="ssh", hosts="lk1:1")


@pytest.mark.usefixtures("nothing_left")
def test_a_restart_that_is_interrupted_leaves_no_engine(
    three: list[Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lab(launcher="ssh", hosts="lk1:1,lk2:1") as lab:
        before = [each.programs() for each in three]
        with pytest.raises(RankError, match="killed by SIGKILL"):
            lab.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Cluster, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lab.restart()
        assert lab.restart() == [0, 1]
        lab.run("dist.barrier()")
        with contextlib.suppress(AssertionError):
            wait_until(
                lambda: [each.programs() for each in three] == before, LIMIT_S, "left"
            )
        assert [each.programs() for each in three] == before


@pytest.mark.usefixtures("nothing_left")
def test_a_host_that_ssh_cannot_reach_is_named(three: list[Namespace]) -> None:
    with pytest.raises(UserError, match=r"nowhere(: ssh failed| has no .*: check how)"):
        Lab(launcher="ssh", hosts="lk1:1,nowhere:1")


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("ending", ["stop", "kill", "shutdown"])
def test_nothing_is_left_on_any_host(ending: str, three: list[Namespace]) -> None:
    start = f"%dist_start --launcher ssh --hosts {HOSTS}"
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        reply = kernel.run(start, timeout=300)
        assert "4 ranks on the CPU of lk1, lk2, lk3" in reply.stdout
        for host in three:
            assert any("labkit.host.agent" in each for each in host.programs())
        if ending == "stop":
            assert (
                "4 ranks on the CPU of" in kernel.run(start, timeout=300).stdout
            )  # the same lab
            other = kernel.run("%dist_start --launcher ssh --hosts lk1:2, lk2:1").stderr
            assert "run %dist_stop before you start one on lk1:2,lk2:1; or %" in other
            other = kernel.run("%dist_start --launcher ssh -n 3").stderr
            assert "or %dist_restart --hosts HOST:N,HOST:N changes how many" in other
            assert f"each host has, now {HOSTS}, and ranks that stay keep" in other
            kernel.run("%dist_stop")
        elif ending == "kill":
            kernel.client.execute(
                "%%dist\nif rank == 0: dist.barrier()\nelse:\n    while True: pass"
            )
            kernel.process.send_signal(signal.SIGKILL)
        else:
            kernel.manager.shutdown_kernel(now=False)


def die_in_a_cell(lab: Lab, host: Namespace, *, rank: int) -> None:
    """Have a host die, on which this rank is; the cell ends, and names it."""
    dying = threading.Timer(2, host.die)
    dying.start()
    with pytest.raises(
        RankError, match=rf"rank {rank}: .*its host {host.name} is gone"
    ):
        lab.run("while True: dist.barrier()")
    dying.join()


@pytest.mark.usefixtures("nothing_left")
def test_a_host_that_dies_ends_the_cell_and_is_named(four: list[Namespace]) -> None:
    with Lab(launcher="ssh", hosts="lk1:1,lk2:1,lk4:1") as lab:
        lab.run("kept = rank")
        die_in_a_cell(lab, four[3], rank=2)
        assert list(lab.status()["state"]) == ["idle", "idle", "dead"]
        with pytest.raises(UserError, match="lk4"):
            lab.restart()
        four[3].set_link("up")
        assert lab.restart() == [2]
        lab.run("dist.barrier()\nhas = 'kept' in globals()")
        assert lab.pull("has", "all") == [True, True, False]


def place() -> str:
    """Code of a cell: which process this is, and its place as torchrun says it."""
    return (
        "import os\nnames = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE']\n"
        "place = [int(os.environ[name]) for name in (*names, 'GROUP_RANK')]\n"
        "has = 'kept' in globals()\ndist.barrier()"
    )


@pytest.mark.usefixtures("nothing_left")
def test_a_lab_takes_other_hosts_and_leaves_those_that_it_does_not_need(
    three: list[Namespace], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    before = [each.programs() for each in three]
    with Lab(num_ranks=1) as here:
        expected = losses_of(here, 3, live=False)
    with Lab(launcher="ssh", hosts="lk1:1,lk2:1") as lab:
        lab.run("kept = rank; import os; networks = os.environ['NCCL_SOCKET_IFNAME']")
        assert lab.pull("networks", "all") == ["^docker0"] * 2
        options = {"checkpoint": folder / "grown", "live": False}
        found = [*losses_of(lab, 1, **options)]
        with pytest.raises(ValueError, match=r"-n 4: the lab is on lk1:1,lk2:1; say"):
            lab.restart(num_ranks=4)
        with pytest.raises(UserError, match="nowhere"):
            lab.restart(hosts="lk1:1,nowhere:1")
        assert lab.restart(hosts="lk1:1,lk2:2,lk3:1") == [2, 3]
        lab.run(place())
        assert lab.pull("place", "all") == [
            [0, 0, 4, 1, 0],
            [1, 0, 4, 2, 1],
            [2, 1, 4, 2, 1],
            [3, 0, 4, 1, 2],
        ]
        assert lab.pull("has", "all") == [True, True, False, False]
        assert lab.hosts == ["lk1", "lk2", "lk3"]
        found += losses_of(lab, 2, resume=True, **options)
        # lk3's rank is of another number, and lk2 is needed no more.
        assert lab.restart(hosts="lk1:1,lk3:1") == [1]
        lab.run(place())
        assert lab.pull("has", "all") == [True, False]
        assert lab.hosts == ["lk1", "lk3"]
        wait_until(
            lambda: three[1].programs() == before[1], LIMIT_S, "an agent is left"
        )
        found += losses_of(lab, 3, resume=True, **options)
        assert list(lab.status()["host"]) == ["lk1", "lk3"]
        assert lab.restart(everyone=True) == [0, 1]
        lab.run("dist.barrier()")
    assert found == pytest.approx(expected, rel=1e-5)


def losses_of(lab: Lab, epochs: int, **options: object) -> list[float]:
    cell = training_cell(epochs=epochs)
    return mean_losses(lab.train("fsdp", cell, **options))  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_left")
def test_ranks_of_a_host_that_died_come_back_on_another(four: list[Namespace]) -> None:
    with Lab(launcher="ssh", hosts="lk1:1,lk4:1,lk2:1") as lab:
        lab.run("kept = rank")
        die_in_a_cell(lab, four[3], rank=1)
        with pytest.raises(UserError, match="lk4"):
            lab.restart(hosts="lk1:1,lk4:1,lk3:1")
        assert lab.restart(hosts="lk1:1,lk3:1,lk2:1") == [1]
        lab.run(place())
        assert lab.pull("has", "all") == [True, False, True]
        assert lab.hosts == ["lk1", "lk3", "lk2"]
        four[3].set_link("up")
        assert lab.restart(hosts="lk1:1,lk3:1,lk4:1") == [2]  # its folder goes now
        assert lab.restart(hosts="lk1:1,lk3:1") == []
        lab.run(place())
        assert lab.pull("place", "all") == [[0, 0, 2, 1, 0], [1, 0, 2, 1, 1]]


def controllers() -> set[psutil.Process]:
    """ipyparallel's, of all labs of this process."""
    return {
        each
        for each in psutil.Process().children(recursive=True)
        if "ipyparallel.controller" in " ".join(each.cmdline())
    }


@pytest.mark.release
@pytest.mark.usefixtures("nothing_left")
def test_agents_that_heard_nothing_for_long_are_started_again(
    three: list[Namespace],
) -> None:
    before, others = [each.programs() for each in three], controllers()
    with Lab(launcher="ssh", hosts="lk1:1,lk2:1") as lab:
        [controller] = controllers() - others
        controller.suspend()  # as all here where a laptop is closed

        def have_ended() -> bool:
            return [each.programs() for each in three] == before

        wait_until(have_ended, LIMIT_S, "agents wait for ever")
        controller.resume()
        wait_until(
            lambda: set(lab.status()["state"]) == {"dead"}, LIMIT_S, "they are not dead"
        )
        assert lab.restart() == [0, 1]
        lab.run("dist.barrier()")


@pytest.mark.usefixtures("nothing_left", "three")
def test_one_host_under_two_names_is_refused() -> None:
    with pytest.raises(UserError, match="lk1 and root@lk1 have the same address"):
        Lab(launcher="ssh", hosts="lk1:1,root@lk1:1")


@pytest.mark.usefixtures("nothing_left")
def test_mpiexec_starts_ranks(
    three: list[Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("mpiexec") is None:
        pytest.skip("there is no mpiexec: apt-get install openmpi-bin")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    hosts = ",".join(f"{each.address}:1" for each in three[:2])
    with Lab(launcher="mpi", hosts=hosts) as lab:
        lab.run(
            "import os\nfound = torch.ones(1) * rank\ndist.all_reduce(found)\n"
            "found = found.item(), len(os.sched_getaffinity(0))\n"
            "of_mpi = [name for name in os.environ if name.startswith('OMPI')]"
        )
        num_cores = len(os.sched_getaffinity(0))
        assert lab.pull("found", "all") == [(1.0, num_cores)] * 2
        assert lab.pull("of_mpi", "all") == [[], []]


def test_what_mpiexec_says_of_its_failure_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho the reason >&2\necho some advice >&2\nexit 3\n")
    mpiexec.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    said = r"exit code 3 and said:\n    the reason\n    some advice\nTry it in a term"
    with pytest.raises(UserError, match=said):
        Lab(launcher="mpi", hosts="localhost:1")


@pytest.mark.usefixtures("nothing_left")
def test_a_link_that_is_down_for_some_seconds_costs_no_rank(
    three: list[Namespace],
) -> None:
    with Lab(launcher="ssh", hosts="lk1:1,lk2:1") as lab:
        three[1].set_link("down")
        up = threading.Timer(5, three[1].set_link, ["up"])
        up.start()
        with contextlib.suppress(RankError):
            lab.run("kept = rank\ndist.barrier()", timeout=30)
        up.join()
        lab.run("dist.barrier()")
        assert lab.pull("kept", "all") == [0, 1]
