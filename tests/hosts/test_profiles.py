"""Ranks where the engines of an ipyparallel profile start: here, in a job of Slurm's
that ipyparallel submits, and over ssh."""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import slurm
from kernels import wait_until
from namespaces import LIMIT_S
from namespaces import SUBNET
from namespaces import Namespace
from slurm import jobs
from training import CELL
from training import mean_losses

from labkit import Lab
from labkit import RankError
from labkit.checks import UserError
from labkit.notebook.hosts.profiles import programs

pytestmark = [pytest.mark.hosts, pytest.mark.engine, pytest.mark.timeout(300)]

HOLDER = "labkit.notebook.hosts.profiles.holder"
MakeProfile = Callable[[str], str]


@pytest.fixture
def make_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeProfile]:
    """Makes a profile with this configuration; after the test its folder has what it
    had before."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    folder = tmp_path / "profile_cluster"

    def make(config: str) -> str:
        for name in ("log", "security", "pid", "startup"):
            (folder / name).mkdir(parents=True)
        (folder / "ipcluster_config.py").write_text(config)
        return "cluster"

    yield make
    wait_until(
        lambda: [*folder.rglob("*labkit*")] == [], LIMIT_S, "files of a lab are left"
    )


@pytest.fixture
def slurm_profile(
    four: list[Namespace], folder: Path, make_profile: MakeProfile
) -> Iterator[str]:
    """One that submits a job with a task on each of two nodes."""
    if reason := slurm.why_not():
        pytest.skip(reason)
    with (
        pytest.MonkeyPatch.context() as patch,
        slurm.running(folder, four[:2]) as config,
    ):
        patch.setenv("SLURM_CONF", str(config))
        yield make_profile(
            # The hosts here have one name, by which ipyparallel takes them for one.
            f"c.Cluster.controller_ip = '{SUBNET}.254'\n"
            "c.Cluster.engine_launcher_class = 'slurm'\n"
            "c.SlurmEngineSetLauncher.batch_template = '''#!/bin/sh\n"
            "#SBATCH --nodes={n} --ntasks-per-node=1\n"
            "srun --mpi=none {program_and_args}\n'''\n"
        )
        wait_until(lambda: jobs() == [], LIMIT_S, "a job is left")


@pytest.mark.usefixtures("nothing_left")
def test_a_job_that_a_profile_submits_has_the_ranks(slurm_profile: str) -> None:
    said: list[str] = []
    before = {*Path.cwd().iterdir()}
    with Lab(3, profile=slurm_profile, nodes=2, on_progress=said.append) as lab:
        [job] = jobs()
        assert f"profile cluster: job {job}: 2 of 2 engines are there" in said
        assert lab.launcher == "profile:cluster"
        assert [each.host_rank for each in lab.placements] == [0, 0, 1]
        run = lab.train("fsdp", CELL, live=False)
        found = mean_losses(run)
        # Other numbers of ranks, on the hosts that there are.
        lab.run("kept = rank")
        with pytest.raises(ValueError, match="profile cluster says which hosts there"):
            lab.restart(hosts="lk1:2")
        assert lab.restart(num_ranks=2) == []
        assert lab.restart(num_ranks=4) == [2, 3]
        assert [each.host_rank for each in lab.placements] == [0, 0, 1, 1]
        lab.run("dist.barrier()\nhas = 'kept' in globals()")
        assert lab.pull("has", "all") == [True, True, False, False]
        assert jobs() == [job]
    assert {*Path.cwd().iterdir()} == before
    with Lab(num_ranks=3) as here:
        run = here.train("fsdp", CELL, live=False)
        assert found == pytest.approx(mean_losses(run), rel=1e-6)


@pytest.mark.usefixtures("nothing_left")
def test_a_job_that_is_cancelled_is_named(slurm_profile: str) -> None:
    with Lab(2, profile=slurm_profile, nodes=2) as lab:
        [job] = jobs()
        begun = threading.Timer(2, subprocess.run, [["scancel", job]])
        begun.start()
        with pytest.raises(RankError, match="killed by SIGTERM"):
            lab.run("import time\nwhile True:\n    time.sleep(0.1)\n    dist.barrier()")
        begun.join()
        launcher = lab._hosts.launcher
        wait_until(launcher.why_gone, LIMIT_S, "the engines count as there")
        ended = r"engines of profile cluster have all ended \(.+\); %dist_stop, then"
        with pytest.raises(UserError, match=ended):
            lab.restart()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("killed", ["waiting", "ready", "with its holder"])
def test_a_notebook_that_is_killed_leaves_no_job(
    slurm_profile: str, killed: str
) -> None:
    num_hosts = 3 if killed == "waiting" else 2  # there are two
    script = (
        "from labkit import Lab\nimport time\n"
        f"lab = Lab({num_hosts}, profile={slurm_profile!r}, nodes={num_hosts},"
        " on_progress=print)\n"
        "print('ready')\ntime.sleep(600)"
    )
    process = psutil.Popen(
        [sys.executable, "-uc", script], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if "0 of 3 engines are there" in line or line == "ready\n":
            break
    assert len(jobs()) == 1
    doomed = [process]
    if killed == "with its holder":
        doomed += [
            each
            for each in process.children(recursive=True)
            if each.cmdline()[-1] == HOLDER
        ]
        assert len(doomed) == 2
    for each in doomed:
        each.kill()
    process.wait()


SSH = """
c.Cluster.controller_ip = "{address}"
c.Cluster.engine_launcher_class = "ssh"
c.SSHEngineSetLauncher.engines = {{"lk1": 2, "lk2": 1}}
c.SSHEngineSetLauncher.remote_python = "{python}"
c.SSHLauncher.scp_args = ["-O", "-F", "{config}"]
"""


@pytest.mark.release
@pytest.mark.usefixtures("nothing_left", "four")
def test_a_host_has_as_many_ranks_as_engines(
    make_profile: MakeProfile, folder: Path
) -> None:
    python = folder / "python"  # an engine finds labkit as the notebook does
    paths = shlex.quote(os.environ.get("PYTHONPATH", ""))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = SSH.format(
        address=f"{SUBNET}.254", python=python, config=folder / "ssh-config"
    )
    with Lab(profile=make_profile(config)) as lab:
        assert [each.host_rank for each in lab.placements] == [0, 0, 1]
        lab.run("dist.barrier()")


def test_a_profile_that_cannot_start_engines_says_why(
    make_profile: MakeProfile,
) -> None:
    name = make_profile("c.Cluster.engine_launcher_class = 'pbs'")
    with pytest.raises(UserError, match=r"starts no engines: .*qsub.*`ipcluster start"):
        Lab(profile=name)


def test_a_program_that_nobody_reads_any_more_ends() -> None:
    number = programs.begin(["sleep", "1000"], "")
    [process] = [e for e in psutil.Process().children() if e.name() == "sleep"]
    assert programs.read(number) == ("", "", None)
    programs.end(number)
    assert not process.is_running()
