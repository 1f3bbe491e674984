"""Ranks that outlive the kernel: started by one, found by another, and ended."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
from isolation import own_environment
from isolation import processes_of
from kernels import Kernel
from kernels import Reply
from kernels import running_kernel
from kernels import wait_until

from labkit import Lab
from labkit.host import watchdog
from labkit.notebook.execution.errors import unheard
from labkit.notebook.keeper.kept_labs import find_labs
from labkit.notebook.keeper.kept_labs import since
from labkit.records import CellEnd
from labkit.records import Outcome
from labkit.records import StepsTaken

pytestmark = [pytest.mark.timeout(240), pytest.mark.engine]

LIMIT_S = 30
PIDS = "%%dist\nimport os\nprint(os.getpid())"
TRAIN = """
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model, optimizer, loader = prepare(
    model, optimizer, dataset, batch_size=8, shuffle=False
)
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


COUNTING = """
handlers, asked = get_ipython().kernel.control_handlers, []
def count(stream, ident, parent, answer=handlers["labkit_request"]):
    asked.extend([1] * (parent["content"]["request"] == "describe"))
    answer(stream, ident, parent)
handlers["labkit_request"] = count
"""
"""Of a cell that waits until it was asked so often how it is."""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where labs have their folders; at the end no process of the test is left."""
    # No `tmp_path`: kernels have sockets in it, whose paths may have 108 bytes.
    made = tempfile.TemporaryDirectory(prefix="keep-", ignore_cleanup_errors=True)
    with made as name:
        folder = Path(name)
        for variable, value in own_environment(folder).items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield folder
        left = [(each, watchdog.words_of(each)) for each in processes_of(folder)]
        for process, _ in left:
            process.kill()
        assert not [words for _, words in left]


def labs_in(folder: Path) -> list[Path]:
    return [each for each in folder.glob("labkit-*") if (each / "kept.json").exists()]


def ok(reply: Reply) -> Reply:
    assert reply.status == "ok", reply
    return reply


def start(kernel: Kernel, keep: str = "60") -> psutil.Process:
    """A kept lab of two ranks; its keeper."""
    ok(kernel.run("%load_ext labkit"))
    reply = ok(kernel.run(f"%dist_start -n 2 --keep {keep}"))
    found = re.search(r"Kept as lab-(\d+): without a kernel", reply.stdout)
    assert found, reply.stdout
    return psutil.Process(int(found[1]))


def attach(
    kernel: Kernel,
    keeper: psutil.Process,
    on_message: Callable[[dict[str, Any]], None] = lambda message: None,
) -> Reply:
    """By its name: whoever runs the tests may have kept a lab as well."""
    kernel.run("%load_ext labkit")
    return kernel.run(f"%dist_attach lab-{keeper.pid}", on_message=on_message)


def restart(kernel: Kernel) -> None:
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)


def losses(kernel: Kernel, strategy: str) -> str:
    ok(kernel.run(f"%%dist_train {strategy} --no-live\n{TRAIN}", timeout=120))
    history = "__import__('labkit').current_lab().runs[-1].history"
    ordered = f"{history}.sort_values(['step', 'rank'])['loss'].tolist()"
    return str(ok(kernel.run(ordered)).result["text/plain"])


def assert_ended(folder: Path, keeper: psutil.Process) -> None:
    wait_until(lambda: not watchdog.is_running(keeper), LIMIT_S, "the keeper is left")
    wait_until(lambda: not labs_in(folder), LIMIT_S, "a folder is left")
    kernels = {"ipykernel_launcher", "labkit.notebook.live.render_process"}

    def left() -> list[list[str]]:
        words = [watchdog.words_of(each) for each in processes_of(folder)]
        return [each for each in words if each and not kernels & {*each}]

    wait_until(lambda: not left(), LIMIT_S, "processes are left")


def test_a_killed_kernel_leaves_ranks_that_work_on_as_before(folder: Path) -> None:
    with running_kernel() as kernel:
        keeper = start(kernel)
        before = {name: losses(kernel, name) for name in ("ddp", "fsdp")}
        ok(kernel.run("%%dist\nkept = torch.ones(2) * rank"))
        pids = ok(kernel.run(PIDS)).stdout
        kernel.process.send_signal(signal.SIGKILL)
    [lab] = labs_in(folder)
    assert lab.stat().st_mode & 0o777 == 0o700
    assert (lab / "kept.json").stat().st_mode & 0o077 == 0
    opened = os.open(lab, os.O_RDONLY)
    with pytest.raises(BlockingIOError):  # so what tidies up leaves it alone
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(opened)
    with running_kernel() as kernel:
        reply = ok(attach(kernel, keeper))
        assert "Ready: 2 ranks on the CPU, gloo; every rank answered" in reply.stdout
        assert f"Kept as lab-{keeper.pid}: without a kernel" in reply.stdout
        assert ok(kernel.run(PIDS)).stdout == pids
        reply = ok(kernel.run("%%dist\nprint(kept.sum().item()); dist.barrier()"))
        assert reply.stdout == "[rank 0] 0.0\n[rank 1] 2.0\n"
        assert {name: losses(kernel, name) for name in before} == before
        ok(kernel.run("%dist_pull kept --rank 1"))
        assert ok(kernel.run("kept")).result["text/plain"] == "tensor([1., 1.])"
        # Another process has to wait.
        told = (
            rf"kernel {kernel.process.pid} has been attached to lab-{keeper.pid} "
            r"since \d\d:\d\d\. Shut that kernel down first"
        )
        with pytest.raises(RuntimeError, match=told):
            Lab.attach(f"lab-{keeper.pid}")
        # A rank dies, is explained, and comes back.
        die = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
        reply = kernel.run(f"%%dist\n{die}\nelse: dist.barrier()")
        assert "rank 1: " in reply.error["evalue"]
        assert "killed by SIGKILL" in reply.error["evalue"]
        assert "rank 1 restarted" in ok(kernel.run("%dist_restart")).stdout
        reply = ok(kernel.run("%%dist\ndist.barrier()\nprint('kept' in globals())"))
        assert reply.stdout == "[rank 0] True\n[rank 1] False\n"
        assert losses(kernel, "fsdp") == before["fsdp"]
        # An interrupt, in a collective.
        interrupted = kernel.run(
            "%%dist\nprint('here')\nif rank == 0: dist.barrier()\nwhile rank: pass",
            on_message=lambda message: (
                kernel.manager.interrupt_kernel()
                if "here" in message["content"].get("text", "")
                else None
            ),
        )
        assert interrupted.error["ename"] == "Interrupted"
        ok(kernel.run("%%dist\ndist.barrier()"))
        assert "has the ranks that it was" in kernel.run("%dist_restart -n 3").stderr
        assert (
            "a lab of 2 ranks on the CPU, gloo is running; run %dist_stop before you "
            "start one with -n 3\n"
        ) in kernel.run("%dist_start -n 3 --keep").stderr
        # Ranks that are started have what the kernel has set by now.
        ok(kernel.run("import os\nos.environ['SET_LATER'] = 'yes'"))
        ok(kernel.run("del os.environ['JUPYTER_DATA_DIR']"))
        ok(kernel.run("%dist_restart --all", timeout=120))
        found = "os.environ['SET_LATER'], 'JUPYTER_DATA_DIR' in os.environ"
        reply = ok(kernel.run(f"%%dist\nimport os\nprint({found})"))
        assert reply.stdout == "[ranks 0-1] yes False\n"
        assert losses(kernel, "ddp") == before["ddp"]
        ok(kernel.run("%dist_stop"))
        assert_ended(folder, keeper)
        there = f"no lab 'lab-{keeper.pid}' is kept on this host; "
        assert there in attach(kernel, keeper).stderr


@pytest.mark.long
def test_a_restarted_kernel_waits_for_the_cell_that_runs(folder: Path) -> None:
    with running_kernel() as kernel:
        keeper = start(kernel)
        mark = folder / "goes-on"
        kernel.client.execute(
            "%%dist\nimport pathlib, time\nx = rank\n"
            f"mark = pathlib.Path({str(mark)!r})\nif rank == 0: mark.touch()\n"
            f"{COUNTING}\n"
            "dist.barrier()\n"
            "while mark.exists() or len(asked) < 4: time.sleep(0.1)\nx += 10\n"
            "dist.destroy_process_group()"
        )
        wait_until(mark.exists, LIMIT_S, "the cell runs")
        restart(kernel)
        said: list[str] = []

        def hear(message: dict) -> None:
            said.append(message["content"].get("text", ""))
            if "the previous kernel's cell is running" in "".join(said):
                mark.unlink(missing_ok=True)

        lines = ok(attach(kernel, keeper, hear)).stdout.split("\r")
        assert not mark.exists()
        assert lines == [line for line, _ in groupby(lines)]  # each of them once
        assert ok(kernel.run("%%dist\ndist.barrier()\nprint(x)")).stdout == (
            "[rank 0] 10\n[rank 1] 11\n"
        )
        # A graceful shutdown leaves the ranks as well; an interrupt ends their cell.
        kernel.client.execute(
            "%%dist\nx = 1\ndist.init_process_group('gloo')\nmark.touch()\n"
            "if rank: dist.barrier()\nelse:\n    while True: pass"
        )
        wait_until(mark.exists, LIMIT_S, "the cell runs")
        kernel.manager.shutdown_kernel(now=False)
    with running_kernel() as kernel:
        said.clear()

        def interrupt(message: dict) -> None:
            had = "previous kernel's cell" in "".join(said)
            said.append(message["content"].get("text", ""))
            if not had and "previous kernel's cell" in "".join(said):
                kernel.manager.interrupt_kernel()

        ok(attach(kernel, keeper, interrupt))
        # The group that the cell has made is over, as after any cell.
        used = "from labkit.rank.engine.rpc import runner\n"
        used += "print(x, runner().group.in_place)"
        reply = ok(kernel.run(f"%%dist\ndist.barrier()\n{used}"))
        assert reply.stdout == "[ranks 0-1] 1 True\n"
        ok(kernel.run("%dist_stop"))
    assert_ended(folder, keeper)


@pytest.mark.long
def test_a_run_whose_kernel_dies_has_all_of_its_records(folder: Path) -> None:
    mark = folder / "goes-on"
    with running_kernel() as kernel:
        keeper = start(kernel)
        wait = f"while os.path.exists({str(mark)!r}): time.sleep(0.1)"
        mark.touch()
        code = TRAIN.replace("loss.backward()", f"{wait}\n    loss.backward()")
        magic = "%%dist_train ddp --name alone --no-live\nimport os, time"
        kernel.client.execute(f"{magic}\n{code}")
        runs = folder / "runs"
        wait_until(
            lambda: bool([*runs.glob("*/rank-1.records")]), LIMIT_S, "it has begun"
        )
        kernel.process.send_signal(signal.SIGKILL)
    with running_kernel() as kernel:
        mark.unlink()
        assert "labkit: " not in ok(attach(kernel, keeper)).stderr
        ok(kernel.run("run = __import__('labkit').load_run('alone')"))
        found = ok(kernel.run("run.state, len(run.history)"))
        assert found.result["text/plain"] == "('finished', 16)"
        found = ok(kernel.run("run.notes"))
        assert (
            "no kernel was attached when this run ended" in found.result["text/plain"]
        )
        found = ok(kernel.run("__import__('labkit').list_runs()['state'].to_dict()"))
        assert found.result["text/plain"] == "{'alone': 'finished'}"
        # What this kernel hears no later one says.
        failed = kernel.run("%%dist\nif rank: 1 / 0")
        assert "ZeroDivisionError" in failed.error["evalue"]
        restart(kernel)
        assert "labkit: " not in ok(attach(kernel, keeper)).stderr
        ok(kernel.run("%dist_stop"))
    assert_ended(folder, keeper)


@pytest.mark.long
def test_a_failure_while_no_kernel_is_there_is_shown_by_the_next(folder: Path) -> None:
    mark = folder / "goes-on"
    failing = (
        "step += 1\n    if rank == 1 and step == 6:\n        mark.touch()\n"
        "        while mark.exists(): time.sleep(0.1)\n"
        "        raise ValueError('disk full on node2')\n    optimizer.step()"
    )
    code = TRAIN.replace("optimizer.step()", failing)
    imports = f"import pathlib, time\nstep, mark = 0, pathlib.Path({str(mark)!r})"
    with running_kernel() as kernel:
        keeper = start(kernel)
        kernel.client.execute(f"%%dist_train ddp --no-live\n{imports}\n{code}")
        wait_until(mark.exists, LIMIT_S, "it is about to fail")
        kernel.process.send_signal(signal.SIGKILL)
    failure = "rank 1: failed at line 19: raise ValueError("
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        said = kernel.run("%%dist\n1").stderr
        assert "no lab is running; %dist_start starts one; %dist_attach " in said
        assert f"\n  lab-{keeper.pid}: 2 ranks on the CPU, gloo, started " in said

        def hear(message: dict) -> None:
            text = message["content"].get("text", "")
            if "the previous kernel's cell is running" in text:
                mark.unlink(missing_ok=True)
            if "has failed in it (" in text and "an interrupt ends it" in text:
                kernel.manager.interrupt_kernel()

        reply = ok(attach(kernel, keeper, hear))
        said = reply.stderr
        assert f"may wait for a rank that has failed in it ({failure}" in reply.stdout
        assert f"labkit: the previous kernel's cell has failed\n{failure}" in said
        assert re.search(r"\nrank 0: stopped at line .*, because rank 1 failed\n", said)
        assert (
            "labkit: rank 1 took 5 optimizer steps, rank 0 took 6, so they no longer "
            "hold one model. To train on, load a checkpoint"
        ) in said
        ok(kernel.run("run = __import__('labkit').load_run('run-1')"))
        found = ok(kernel.run("run.state, len(run.mismatches)"))
        assert found.result["text/plain"] == "('failed', 1)"
        restart(kernel)
        assert "labkit: " not in ok(attach(kernel, keeper)).stderr
        ok(kernel.run("%dist_stop"))
    assert_ended(folder, keeper)


@pytest.mark.long
def test_a_rank_that_died_meanwhile_is_explained_and_brought_back(
    folder: Path,
) -> None:
    with running_kernel() as kernel:
        keeper = start(kernel)
        pids = ok(kernel.run(f"{PIDS}\nkept = 1")).stdout
        kernel.process.send_signal(signal.SIGKILL)
    found = re.search(r"\[rank 1\] (\d+)", pids)
    assert found
    psutil.Process(int(found[1])).send_signal(signal.SIGKILL)
    with running_kernel() as kernel:
        reply = ok(attach(kernel, keeper))
        assert re.search(r"rank 1: dead since .*, killed by SIGKILL", reply.stdout)
        assert "every rank answered" not in reply.stdout
        assert "%dist_restart" in kernel.run("%%dist\n1").stderr
        assert "rank 1 restarted" in ok(kernel.run("%dist_restart")).stdout
        reply = ok(kernel.run("%%dist\ndist.barrier()\nprint('kept' in globals())"))
        assert reply.stdout == "[rank 0] True\n[rank 1] False\n"
        ok(kernel.run("%dist_stop"))
    assert_ended(folder, keeper)


@pytest.mark.long
def test_ranks_end_by_themselves_where_no_kernel_comes(folder: Path) -> None:
    with running_kernel() as kernel:
        keeper = start(kernel, "0.02")
        # With a kernel attached no time is counted.
        ok(kernel.run("%%dist\nimport time; time.sleep(3)"))
        assert keeper.is_running()
        kernel.process.send_signal(signal.SIGKILL)
        assert_ended(folder, keeper)


@pytest.mark.parametrize("victim", ["keeper", "controller"])
@pytest.mark.long
def test_what_carries_a_kept_lab_may_die(folder: Path, victim: str) -> None:
    with running_kernel() as kernel:
        keeper = start(kernel)
        kernel.run("%%dist\nimport time")
        process = keeper
        if victim == "controller":
            [process] = [
                each
                for each in keeper.children()
                if "ipyparallel.controller" in " ".join(each.cmdline())
            ]
        process.send_signal(signal.SIGKILL)
        reply = kernel.run("%%dist\ntime.sleep(60)")
        assert reply.status == "error"
        said = reply.stderr + reply.error.get("evalue", "")
        if victim == "keeper":
            assert "the process that keeps the lab" in said
            assert "%dist_stop, then %dist_start --keep" in said
        else:
            assert "ipyparallel's controller" in said
            ok(kernel.run("%dist_restart --all", timeout=120))
            ok(kernel.run("%%dist\ndist.barrier()"))
        ok(kernel.run("%dist_stop"))
        assert_ended(folder, keeper)


def test_a_kernel_that_dies_while_its_lab_starts_leaves_nothing(folder: Path) -> None:
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        kernel.client.execute("%dist_start -n 2 --keep")
        wait_until(
            lambda: bool([*folder.glob("labkit-????????")]), LIMIT_S, "it starts"
        )
        [keeper] = [
            each
            for each in kernel.process.children()
            if "keeper" in " ".join(each.cmdline())
        ]
        kernel.process.send_signal(signal.SIGKILL)
        assert_ended(folder, keeper)


@pytest.mark.long
def test_several_are_listed_and_the_wrong_ones_refused(folder: Path) -> None:
    others = find_labs()[0]
    with running_kernel() as first, running_kernel() as second:
        keepers = [start(first), start(second)]
        labs = {int(lab.name.split("-")[1]): path for path, lab in find_labs()[0]}
        first.process.send_signal(signal.SIGKILL)
        second.process.send_signal(signal.SIGKILL)
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        reply = ok(kernel.run("%dist_start -n 1"))
        assert f"another lab is kept; lab-{keepers[0].pid}: 2 ranks" in reply.stderr
        assert (
            "is running in this kernel; %dist_stop" in kernel.run("%dist_attach").stderr
        )
        assert "one that is kept for 30" in kernel.run("%dist_start --keep").stderr
        kernel.run("%dist_stop")
        reply = kernel.run("%dist_attach")
        assert " labs are kept on this host; %dist_attach NAME" in reply.stderr
        for keeper in keepers:
            assert re.search(
                rf"lab-{keeper.pid}: 2 ranks on the CPU, gloo, started at ..:..; "
                r"without a kernel for \d+ min, ends ",
                reply.stderr,
            )
        assert "no lab 'lab-1' is kept" in kernel.run("%dist_attach lab-1").stderr
        mine, other = labs[keepers[0].pid], labs[keepers[1].pid]
        keepers[1].suspend()
        assert "another lab is kept; lab-" in kernel.run("%dist_start -n 1").stderr
        kernel.run("%dist_stop")
        keepers[1].resume()
        other.chmod(0o755)
        reply = attach(kernel, keepers[1])
        assert f"refused: {other} has mode 755 and not 700" in reply.stderr
        other.chmod(0o700)
        told = json.loads((mine / "kept.json").read_text())
        told["versions"]["torch"] = "1.0"
        (mine / "kept.json").write_text(json.dumps(told))
        reply = attach(kernel, keepers[0])
        assert re.search(
            r"other versions: torch 1\.0 there and 2\S+ here", reply.stderr
        )
        # As that says, such a one is ended by its keeper.
        keepers[0].terminate()
        ok(attach(kernel, keepers[1]) if others else kernel.run("%dist_attach"))
        ok(kernel.run("%dist_stop"))
    for keeper in keepers:
        assert_ended(folder, keeper)


@pytest.mark.long
def test_a_script_may_keep_its_ranks(folder: Path) -> None:
    code = (
        "from labkit import Lab\nlab = Lab(num_ranks=2, keep=5)\n"
        "lab.run('x = rank')\nprint(lab.kept[0])\nimport os\nos._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    code = (
        f"from labkit import Lab\nwith Lab.attach({done.stdout.strip()!r}) as lab:\n"
        "    print(lab.pull('x', 'all'))"
    )
    again = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert again.stdout == "[0, 1]\n", again.stderr


def test_since_when_is_said_with_the_day_where_that_is_another() -> None:
    assert re.fullmatch(r"since \d\d:\d\d", since(time.time()))
    assert re.fullmatch(r"since 1970-01-\d\d at \d\d:\d\d", since(86400.0))


def test_ranks_of_different_cells_are_not_compared() -> None:
    """Trials run on parts of a lab, each part with its own rank 0."""
    ends = {
        rank: CellEnd(cell, float(-rank), Outcome(rank, status), StepsTaken(0, n, True))
        for rank, (cell, status, n) in enumerate(
            [(1, "ok", 6), (1, "ok", 6), (2, "error", 5), (2, "error", 4)]
        )
    }
    failed, steps = unheard(ends)
    assert failed.splitlines()[1:] == ["rank 2: ", "rank 3: the same"]
    assert steps.startswith("rank 3 took 4 optimizer steps, rank 2 took 5, so they ")
