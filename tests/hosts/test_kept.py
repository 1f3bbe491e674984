"""Ranks on other hosts that outlive the kernel."""

import signal
import time

import psutil
import pytest
from kernels import running_kernel
from kernels import wait_until
from namespaces import LIMIT_S
from namespaces import Namespace
from test_slurm import jobs
from test_slurm import no_job_left as no_job_left  # a fixture
from test_slurm import nodes as nodes  # a fixture
from training import CELL
from training import mean_losses

from labkit import Lab
from labkit import timeouts

pytestmark = [pytest.mark.hosts, pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def own_folder(four: list[Namespace], monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for labs where `TMPDIR` says, as the kernels do."""
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.usefixtures("nothing_left")
def test_ranks_are_found_with_their_variables(three: list[Namespace]) -> None:
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        start = "%dist_start --launcher ssh --hosts lk1:2,lk2:1 --keep 5"
        reply = kernel.run(start, timeout=300)
        assert "3 ranks on the CPU of lk1, lk2, gloo" in reply.stdout
        assert "Kept as lab-" in reply.stdout
        kernel.run("%%dist\nkept = rank + 1")
        kernel.process.send_signal(signal.SIGKILL)
    with Lab.attach() as lab:
        assert (lab.hosts, lab.launcher) == (["lk1", "lk2"], "ssh")
        assert lab.pull("kept", "all") == [1, 2, 3]
        run = lab.train("fsdp", CELL, live=False)
        with Lab(num_ranks=3) as here:
            expected = here.train("fsdp", CELL, live=False)
        assert mean_losses(run) == pytest.approx(mean_losses(expected), rel=1e-6)
        with pytest.raises(RuntimeError, match=r"rank 2: .*killed by SIGKILL"):
            lab.run(
                "import os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)"
                "\nelse: dist.barrier()"
            )
        assert lab.restart() == [2]
        lab.run("dist.barrier()\nhas = 'kept' in globals()")
        assert lab.pull("has", "all") == [True, True, False]
        assert lab.restart(everyone=True) == [0, 1, 2]
        lab.run("dist.barrier()")


@pytest.mark.usefixtures("nothing_left")
def test_nothing_is_left_where_no_kernel_comes(three: list[Namespace]) -> None:
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        start = "%dist_start --launcher ssh --hosts lk1:1,lk3:1 --keep 0.05"
        assert "Kept as lab-" in kernel.run(start, timeout=300).stdout
        kernel.process.send_signal(signal.SIGKILL)


@pytest.mark.release
@pytest.mark.usefixtures("nothing_left")
def test_ranks_are_there_after_the_notebook_has_slept(three: list[Namespace]) -> None:
    """As a laptop does whose lid is closed, and whose network comes back later."""
    with Lab(launcher="ssh", hosts="lk1:1,lk2:1", keep=5) as lab:
        lab.run("kept = rank + 1")
        assert lab.kept is not None
        keeper = psutil.Process(int(lab.kept[0].removeprefix("lab-")))
        asleep = [keeper, *keeper.children(recursive=True)]
        for process in asleep:
            process.suspend()
        for host in three[:2]:
            host.set_link("down")
        time.sleep(2 * timeouts.UNHEARD_S)  # what they do not hear takes that long
        for process in asleep:
            process.resume()
        for host in three[:2]:
            host.set_link("up")
        lab.run("dist.barrier()")
        assert lab.pull("kept", "all") == [1, 2]


@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_a_job_outlives_the_kernel(nodes: list[Namespace]) -> None:
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        start = "%dist_start --launcher slurm -n 2 --nodes 2 --keep 5"
        assert "Kept as lab-" in kernel.run(start, timeout=300).stdout
        kernel.run("%%dist\nkept = rank + 1")
        [job] = jobs()
        kernel.process.send_signal(signal.SIGKILL)
    with Lab.attach() as lab:
        assert jobs() == [job]
        assert lab.launcher == "slurm"
        assert lab.pull("kept", "all") == [1, 2]
        assert lab.restart(everyone=True) == [0, 1]
        assert jobs() == [job]


@pytest.mark.release
@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_a_job_ends_where_no_kernel_comes(nodes: list[Namespace]) -> None:
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        start = "%dist_start --launcher slurm -n 2 --nodes 2 --keep 0.05"
        assert "Kept as lab-" in kernel.run(start, timeout=300).stdout
        assert len(jobs()) == 1
        kernel.process.send_signal(signal.SIGKILL)
        wait_until(lambda: jobs() == [], LIMIT_S, "a job is left")
