"""Ranks in Slurm jobs: a real Slurm, with two of the hosts as its nodes."""

import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from kernels import wait_until
from namespaces import LIMIT_S
from namespaces import Namespace
from slurm import jobs
from training import CELL
from training import mean_losses
from training import training_cell

from labkit import Lab
from labkit import RankError
from labkit.checks import UserError

pytestmark = [pytest.mark.hosts, pytest.mark.engine, pytest.mark.timeout(600)]

FOREVER = "import time\nwhile True:\n    time.sleep(0.1)\n    dist.barrier()"


@pytest.fixture(scope="module")
def nodes(four: list[Namespace], folder: Path) -> Iterator[list[Namespace]]:
    """The hosts of Slurm's nodes, lk1 and lk2."""
    if reason := slurm.why_not():
        pytest.skip(reason)
    with (
        pytest.MonkeyPatch.context() as patch,
        slurm.running(folder, four[:2]) as config,
    ):
        patch.setenv("SLURM_CONF", str(config))
        yield four[:2]


@pytest.fixture
def no_job_left(nodes: list[Namespace]) -> Iterator[None]:
    yield
    wait_until(lambda: jobs() == [], LIMIT_S, "a job is left")


@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_a_job_of_its_own_has_the_ranks() -> None:
    said: list[str] = []
    with Lab(3, launcher="slurm", nodes=2, on_progress=said.append) as lab:
        assert len(jobs()) == 1
        assert any(line.startswith("Slurm: ") for line in said)
        assert [each.host for each in lab.placements] == ["lk1", "lk1", "lk2"]
        lab.run(
            "import os\nnames = [n for n in os.environ if n.startswith('SLURM')]\n"
            "place = os.environ['LOCAL_RANK'], os.environ['GROUP_RANK']"
        )
        assert lab.pull("place", "all") == [("0", "0"), ("1", "0"), ("0", "1")]
        # What a library would take for the place of the rank.
        assert "SLURM_JOB_ID" in lab.pull("names", 0)
        assert not {"SLURM_PROCID", "SLURM_NTASKS"} & set(lab.pull("names", 0))
        found = losses(lab)
    with Lab(num_ranks=3) as here:
        assert found == pytest.approx(losses(here), rel=1e-6)


def losses(lab: Lab) -> list[float]:
    run = lab.train("fsdp", CELL, live=False)
    assert run.num_steps == 8
    return mean_losses(run)


@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_a_lab_grows_as_far_as_its_job() -> None:
    with Lab(3, launcher="slurm", nodes=2) as lab:
        [job] = jobs()
        lab.run("kept = rank")
        with pytest.raises(ValueError, match=f"Slurm job {job} is for 3 tasks, on lk"):
            lab.restart(num_ranks=4)
        with pytest.raises(ValueError, match=r"says which hosts there are .*-n N"):
            lab.restart(hosts="lk1:2")
        assert lab.restart(num_ranks=2) == []
        assert [each.host for each in lab.placements] == ["lk1", "lk1"]
        lab.run("dist.barrier()")
        assert lab.restart(num_ranks=3) == [2]
        assert [each.host for each in lab.placements] == ["lk1", "lk1", "lk2"]
        lab.run("dist.barrier()\nhas = 'kept' in globals()")
        assert lab.pull("has", "all") == [True, True, False]
        assert jobs() == [job]


@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_a_step_has_all_gpus_of_the_job() -> None:
    options = "--gpus-per-task=1"
    with Lab(2, launcher="slurm", nodes=1, launcher_options=options) as lab:
        lab.run("import os\nseen = os.environ['CUDA_VISIBLE_DEVICES']")
        assert lab.pull("seen", "all") == ["0,1", "0,1"]


@pytest.mark.usefixtures("no_job_left")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_notebook_that_ends_while_it_waits_leaves_no_job(
    ending: signal.Signals,
) -> None:
    script = (
        "from labkit import Lab\n"
        "options = '--begin=now+3600'\n"
        "Lab(launcher='slurm', launcher_options=options, on_progress=print)"
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "(BeginTime)" in line:  # what Slurm says that it waits for
            break
    assert len(jobs()) == 1
    process.send_signal(ending)
    assert process.wait(LIMIT_S)


@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_in_an_allocation_its_hosts_are_used(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from labkit import Lab

        for settings in ({}, {"num_ranks": 2, "nodes": 1}):
            with Lab(launcher="slurm", **settings) as lab:
                lab.run("dist.barrier()")
                print([each.host for each in lab.placements])
        """)
    )
    command = ["salloc", "--nodes=2", "--ntasks=3", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first in ("['lk1', 'lk1', 'lk2']", "['lk1', 'lk2', 'lk2']")
    assert second == "['lk1', 'lk1']"


@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_a_job_that_is_cancelled_is_named() -> None:
    with Lab(2, launcher="slurm", nodes=2) as lab:
        [job] = jobs()
        cancel = threading.Timer(2, subprocess.run, [["scancel", job]])
        cancel.start()
        with pytest.raises(
            RankError, match=f"Slurm job {job} was cancelled; %dist_stop"
        ):
            lab.run(FOREVER)
        cancel.join()
        with pytest.raises(UserError, match=rf"job {job} .*; %dist_stop, then"):
            lab.restart()


@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_a_kernel_that_is_killed_leaves_no_job(tmp_path: Path) -> None:
    script = (
        "from labkit import Lab\nimport time\n"
        "lab = Lab(2, launcher='slurm', nodes=2)\nprint('ready', flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.usefixtures("no_job_left")
def test_what_slurm_does_not_give_is_said() -> None:
    with pytest.raises(UserError, match=r"salloc got no job: .*Invalid partition"):
        Lab(2, launcher="slurm", launcher_options="--partition=none")
    with pytest.raises(UserError, match="no job: PartitionNodeLimit, so Slurm"):
        Lab(launcher="slurm", nodes=3)


@pytest.mark.release
@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_a_run_stops_with_a_checkpoint_before_the_job_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm counts in minutes."""
    endless = CELL.replace("for x, y in loader", "for x, y in every_batch(loader)")
    steps = "def every_batch(loader):\n    while True:\n        yield from loader\n"
    with Lab(2, launcher="slurm", nodes=2, launcher_options="--time=2") as lab:
        run = lab.train("fsdp", steps + endless, live=False, checkpoint=tmp_path)
        assert run.state == "interrupted"
        said = "was stopped after a step, 60 s before the Slurm job"
        assert said in capsys.readouterr().err
        saved = run.num_steps
        with pytest.raises(RankError, match="has reached its time limit"):
            lab.run(FOREVER)
    with Lab(2, launcher="slurm", nodes=2) as lab:
        again = lab.train("fsdp", CELL, live=False, checkpoint=tmp_path, resume=True)
        assert f"resumed from step {saved}" in capsys.readouterr().out
        assert again.state == "finished"


@pytest.mark.release
@pytest.mark.usefixtures("nothing_left", "no_job_left")
def test_a_job_that_is_requeued_resumes(tmp_path: Path) -> None:
    """A script with `resume` is the same in its first job and in every other."""
    checkpoint, told = tmp_path / "checkpoint", tmp_path / "told"
    script = tmp_path / "script.py"
    script.write_text(
        "from labkit import Lab\n"
        "with Lab(launcher='slurm') as lab:\n"
        f"    run = lab.train('fsdp', {training_cell(pause_s=2)!r}, live=False,\n"
        f"                    checkpoint={str(checkpoint)!r}, every=1, resume=True)\n"
        f"open({str(told)!r}, 'w').write(f'{{run.resumed_from}} {{run.num_steps}}')\n"
    )
    options = ["--requeue", "--nodes=2", "--ntasks=2", "--chdir", str(tmp_path)]
    command = shlex.join([sys.executable, str(script)])
    subprocess.run(["sbatch", *options, "--wrap", command], check=True)
    [job] = jobs()
    wait_until(lambda: any(checkpoint.glob("step-*")), 120, "no checkpoint is there")
    subprocess.run(["scontrol", "requeue", job], check=True)
    update = ["scontrol", "update", f"JobId={job}", "StartTime=now"]  # not in 2 minutes
    wait_until(
        lambda: subprocess.run(update, check=False).returncode == 0,
        LIMIT_S,
        "the job cannot start again",
    )
    wait_until(told.exists, 300, "the job does not end")
    resumed_from, num_steps = told.read_text().split()
    assert 1 <= int(resumed_from) < int(num_steps) == 8
