"""The self-test: right where all is right, and each check fails on a real fault."""

import contextlib
import dataclasses
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kernels import Kernel
from kernels import wait_until

import labkit
from labkit import Lab
from labkit import timeouts
from labkit.__main__ import main
from labkit.checks import UserError
from labkit.lab import running_labs
from labkit.notebook.cluster.engines import Cluster
from labkit.notebook.cluster.rank_group import RankGroup
from labkit.selftest.bench import Bench
from labkit.selftest.machine import Finding
from labkit.selftest.machine import Gpu
from labkit.selftest.machine import Machine
from labkit.selftest.machine import find
from labkit.selftest.machine import in_use
from labkit.selftest.machine import read_machine
from labkit.selftest.report import FAILED
from labkit.selftest.report import LOOK
from labkit.selftest.report import NOT_APPLICABLE
from labkit.selftest.report import NOT_RUN
from labkit.selftest.report import OK
from labkit.selftest.report import Line
from labkit.selftest.report import Report
from labkit.selftest.session import examine
from labkit.selftest.session import run_checks
from labkit.selftest.table import CHECKS
from labkit.selftest.table import Check
from labkit.selftest.training import judge_bandwidth
from labkit.strategies import STRATEGIES

pytestmark = pytest.mark.timeout(120)

SHARING = [
    name
    for name, strategy in STRATEGIES.items()
    if not (strategy.is_by_hand or strategy.is_single or strategy.server)
]


@pytest.fixture
def bench(lab: Lab, tmp_path: Path) -> Bench:
    """The checks' bench, on the shared lab."""
    bench = Bench(tmp_path, Machine())
    bench.use(lab)
    return bench


def seen(name: str, bench: Bench) -> Line:
    return examine(CHECKS[name], bench)


# ---- where all is right ----


@pytest.mark.timeout(240)
@pytest.mark.long
def test_the_whole_of_it(tmp_path: Path) -> None:
    """By the command line, in a folder that holds nothing but its file after it."""
    environment = {k: v for k, v in os.environ.items() if k != "LABKIT_RUNS"}
    environment["PYTHONPATH"] = str(Path(labkit.__file__).parents[1])
    environment["LABKIT_CHECKED_BY"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "labkit", "check", "-n", "2", "--device", "cpu"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
    assert f"1/{len(CHECKS) + 1} collectives are right" in done.stderr
    [file] = tmp_path.iterdir()  # no runs
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", file.read_text(), re.MULTILINE)[1:]
    states = dict(rows)
    assert list(states) == ["start", *(check.what for check in CHECKS.values())]
    on_gpus = {check.what for check in CHECKS.values() if check.needs_gpu}
    assert {what for what, state in states.items() if state == "n/a"} == on_gpus
    assert {states[what] for what in states.keys() - on_gpus} <= {"ok", "look"}
    wait_until(lambda: not left_behind(str(tmp_path)), 20, "the end of all processes")


def left_behind(mark: str) -> list[psutil.Process]:
    """Processes that have this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("LABKIT_CHECKED_BY") == mark:
                found.append(process)
    return found


@pytest.mark.release
def test_a_notebook_shows_a_table_and_keeps_its_lab(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.run("%%dist\nmine = 7")
    file = tmp_path / "found.md"
    reply = kernel.run(f"%dist_check --only all-reduce,raise --output {file}")
    assert reply.status == "ok", reply.stderr
    assert reply.stderr == ""  # which a notebook shows in red
    assert "A lab of 2 ranks on the CPU, gloo is running here: it stays" in reply.stdout
    assert "<table>" in reply.result["text/html"]
    assert "collectives are right" in reply.result["text/plain"]
    assert "a rank raises" in file.read_text()
    assert kernel.run("%%dist\nprint(mine)").stdout == "[ranks 0-1] 7\n"
    assert len(kernel.lab_tokens()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--only nothing", "unknown check 'nothing'; choose one of: all-reduce"),
        ("-n 0", "choose 1 or more"),
        ("--device cuda --backend nccl -n 99", ""),
    ],
)
def test_a_wrong_command_line_has_its_own_status(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", *line.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.release
def test_the_stop_button_shows_what_was_found(kernel: Kernel, tmp_path: Path) -> None:
    def stop_at_the_raise(message: dict[str, Any]) -> None:
        text = message["content"].get("text", "")
        if "a rank raises" in text and not stopped:
            stopped.append(text)
            threading.Timer(0.0, kernel.manager.interrupt_kernel).start()

    stopped: list[str] = []
    line = f"%dist_check --only ddp,raise,timeout --output {tmp_path / 'found.md'}"
    reply = kernel.run(line, on_message=stop_at_the_raise)
    assert reply.error["ename"] == "Interrupted"
    [shown] = reply.displays
    assert "ddp against one process" in shown["text/html"]
    assert "; interrupted after " in shown["text/plain"]
    assert len(kernel.lab_tokens()) == 1
    assert kernel.run("%%dist\nprint(world_size)").stdout == "[ranks 0-1] 2\n"


# What needs GPUs is tried here without, as far as it goes.
@pytest.mark.parametrize("name", ["timeout-sharded", "kill-restarting"])
@pytest.mark.long
def test_a_check_for_gpus_works_on_the_cpu(name: str, bench: Bench) -> None:
    line = seen(name, bench)
    assert line.state == OK, line.details


# ---- planted faults ----

WRONG_ALL_REDUCE = """
if rank == 1:
    labkit_real = dist.all_reduce
    def wrong(tensor, *args, **kwargs):
        labkit_real(tensor, *args, **kwargs)
        tensor += 1
    dist.all_reduce = wrong
"""
SLOW_ALL_REDUCE = """
import time
labkit_real = dist.all_reduce
def slow(*args, **kwargs):
    time.sleep(0.4)
    return labkit_real(*args, **kwargs)
dist.all_reduce = slow
"""
# As large as it was, with a gradient that is not: what a strategy may get wrong.
WRONG_GRADIENT = """
labkit_real = torch.nn.functional.mse_loss
def wrong(*args, **kwargs):
    loss = labkit_real(*args, **kwargs)
    return loss + (loss - loss.detach()) * (rank / 10)
torch.nn.functional.mse_loss = wrong
"""
NO_REDUCTION = """
from labkit.strategies.ddp import DDP
labkit_real = DDP.begin_backward
DDP.begin_backward = lambda self, roots, used: None
"""
DOUBLED_GRADIENT = """
from labkit.strategies.parameter_server.server import Server
labkit_real = Server._receive_gradients
def twice(self, worker, given, served, sums):
    labkit_real(self, worker, given, served, sums)
    [total.mul_(2) for total in sums.values()]
Server._receive_gradients = twice
"""
FORGOTTEN_STATE = """
from labkit.rank.measuring.step_profiler import StepProbe
labkit_real = StepProbe._components
StepProbe._components = lambda self: {**labkit_real(self), "optimizer_state": []}
"""
LEAKED_GROUP = """
from labkit.rank.training.session import Session
labkit_real = Session.prepare
def leaky(self, *args, **kwargs):
    dist.new_group()
    return labkit_real(self, *args, **kwargs)
Session.prepare = leaky
"""
NOTHING_LOADED = """
from labkit.rank.training.cell_checkpoints import Checkpoints
labkit_real = Checkpoints.load_checkpoint
Checkpoints.load_checkpoint = lambda self, folder: {}
"""
LOST_VARIABLES = """
def labkit_forget(result):
    if rank == 1 and result.error_in_exec is not None:
        get_ipython().user_ns.pop("labkit_kept", None)
get_ipython().events.register("post_run_cell", labkit_forget)
"""
FORGETS_NO_MORE = """
get_ipython().events.unregister("post_run_cell", labkit_forget)
"""
NO_REPORT = """
from labkit.rank.measuring import oom_report
labkit_real = oom_report.is_out_of_memory
oom_report.is_out_of_memory = lambda error: False
"""
DEAF = """
import time
labkit_real = time.sleep
def deaf(seconds):
    while True:
        try:
            labkit_real(seconds)
        except BaseException:
            pass
if rank == 1:
    time.sleep = deaf
"""
FAULTS = [
    (
        "all-reduce",
        WRONG_ALL_REDUCE,
        "if rank == 1: dist.all_reduce = labkit_real",
        r"rank 1 got 2,002,\d+ wrong elements",
    ),
    (
        "bandwidth",
        SLOW_ALL_REDUCE,
        "dist.all_reduce = labkit_real",
        "0.0.* GB/s on each rank's bus",
    ),
    *(
        (
            name,
            WRONG_GRADIENT,
            "torch.nn.functional.mse_loss = labkit_real",
            "its gradient differs between ranks"  # as they have the same samples
            if name == "tensor"
            else f"{name}: the loss of step 2 is .*; one process has",
        )
        for name in SHARING
    ),
    (
        "ddp",
        NO_REDUCTION,
        "DDP.begin_backward = labkit_real",
        "ddp: the loss of step 2",
    ),
    (
        "parameter_server",
        DOUBLED_GRADIENT,
        "Server._receive_gradients = labkit_real",
        "parameter_server: the loss of step 2",
    ),
    (
        "memory",
        FORGOTTEN_STATE,
        "StepProbe._components = labkit_real",
        "labkit measured 1 MiB, and tensors hold 2.01 MiB",
    ),
    ("groups", LEAKED_GROUP, "Session.prepare = labkit_real", "after 2, 4 and 6 runs"),
    (
        "checkpoint",
        NOTHING_LOADED,
        "Checkpoints.load_checkpoint = labkit_real",
        "zero1, from a checkpoint of fsdp: the loss of step 1",
    ),
    ("raise", LOST_VARIABLES, FORGETS_NO_MORE, "rank 1 has lost its variables"),
    (
        "out-of-memory",
        NO_REPORT,
        "oom_report.is_out_of_memory = labkit_real",
        "no report of what rank 0 held",
    ),
]


@contextlib.contextmanager
def planted(lab: Lab, fault: str, mended: str) -> Iterator[None]:
    """A fault in the engines, in this block."""
    lab.run(fault)
    try:
        yield
    finally:
        lab.run(mended)


@pytest.mark.parametrize(("name", "fault", "mended", "said"), FAULTS)
def test_a_fault_in_the_engines_is_found(
    name: str, fault: str, mended: str, said: str, bench: Bench
) -> None:
    with planted(bench.lab, fault, mended):
        line = seen(name, bench)
    assert line.state == (LOOK if name in ("groups", "bandwidth") else FAILED), line
    assert re.search(said, line.text), line


def test_every_check_of_what_ranks_do_has_a_fault() -> None:
    elsewhere = {"interrupt", "timeout", "kill"}
    on_gpus = {name for name, check in CHECKS.items() if check.needs_gpu}
    assert {fault[0] for fault in FAULTS} | elsewhere | on_gpus == set(CHECKS)


@pytest.mark.parametrize(
    "name", ["interrupt", pytest.param("timeout", marks=pytest.mark.long)]
)
def test_a_rank_that_cannot_be_stopped_is_found(
    name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "KILL_AFTER_S", 2.0)
    # The rank that is killed for it takes the fault along.
    bench.lab.run(DEAF)
    line = seen(name, bench)
    assert line.state == FAILED
    assert re.fullmatch("rank [01] did not stop and was killed", line.text)


def test_a_broken_restart_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise UserError("no engine starts")

    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "start_engines", broken)
        line = seen("kill", bench)
    assert (line.state, line.text) == (FAILED, "UserError: no engine starts")


def test_a_slow_all_reduce_is_worth_a_look() -> None:
    assert judge_bandwidth(200e9, 400e9, 2**28, "nccl", 8).advice == ""
    slow = judge_bandwidth(5e9, 400e9, 2**28, "nccl", 8)
    assert "5 GB/s on each rank's bus, for 256 MiB" in slow.text
    assert "a copy from GPU to GPU 400 GB/s" in slow.text
    assert "1.2% of the copy; NCCL_DEBUG=INFO" in slow.advice
    assert judge_bandwidth(1e9, 20e9, 2**24, "gloo", 0).advice == ""
    assert "fewer cores" in judge_bandwidth(1e7, 20e9, 2**24, "gloo", 0).advice
    shared = judge_bandwidth(1e9, 2e12, 2**28, "gloo", 1)
    assert "nccl needs a GPU for each rank" in shared.advice


@pytest.mark.engine
@pytest.mark.long
def test_a_group_that_does_not_work_fails_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(RankGroup, "_are_right", lambda self, sums: False)
    labs = {*running_labs()}
    words = ["check", "-n", "1", "--device", "cpu", "--only", "all-reduce,shared-gpu"]
    assert main([*words, "--output", str(tmp_path / "no" / "folder")]) == 1
    shown = capsys.readouterr()
    assert re.search(
        r"^start +FAILED +the process group does not work", shown.out, re.M
    )
    assert re.search(r"^collectives are right +not run", shown.out, re.M)
    assert re.search(r"^several ranks on one GPU +n/a", shown.out, re.M)
    assert "is not written" in shown.err
    assert {*running_labs()} == labs


# ---- time, and interrupts ----


def hang(bench: Bench) -> object:
    bench.lab.run("import time\ntime.sleep(600)", hang_after=0)


@pytest.mark.release
@pytest.mark.engine
def test_a_check_that_hangs_fails_and_an_interrupt_ends_them_all(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the check between them has a lab that works."""
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))
    # A shell starts what is in its background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    labs = {*running_labs()}
    # Long enough for a busy machine to come to the sleep, whose stack is asserted.
    hanging = Check("hang", "hangs", hang, limit_s=10.0)
    endless = dataclasses.replace(hanging, limit_s=100.0)
    threads: list[threading.Thread] = []
    over = threading.Event()

    def interrupt() -> None:
        while not over.wait(0.1):
            for lab in set(running_labs()) - set(labs):
                with contextlib.suppress(RuntimeError):  # it starts, or it stops
                    if "time.sleep(600)" in repr(lab.stack()):
                        os.kill(os.getpid(), signal.SIGINT)
                        return

    def on_check(what: str) -> None:
        checked.append(what)
        if checked.count("hangs") == 2 and not threads:
            threads.append(threading.Thread(target=interrupt))
            threads[0].start()

    checked: list[str] = []
    report = run_checks(
        [hanging, CHECKS["ddp"], endless, CHECKS["memory"]],
        Machine(),
        {"num_ranks": 1, "device": "cpu"},
        num_ranks=1,
        device="cpu",
        backend="gloo",
        on_check=on_check,
    )
    over.set()
    threads[0].join()
    assert [line.state for line in report.lines] == [OK, FAILED, OK, NOT_RUN]
    hung = report.lines[1]
    assert hung.text == "not over after 10 s; the next check has another lab"
    assert "time.sleep(600)" in hung.details
    assert not report.is_whole
    assert not report.is_right
    assert "; interrupted after " in report.headline
    assert {*running_labs()} == labs
    assert list(tmp_path.iterdir()) == []
    assert os.environ["LABKIT_RUNS"] == str(tmp_path)


# ---- what is known of the machine ----

H100 = Gpu("NVIDIA H100", 80 * 2**30, 79 * 2**30)
SMALL = Gpu("NVIDIA A100", 40 * 2**30, 40 * 2**30)
BUSY = dataclasses.replace(H100, free=10 * 2**30)
WELL = Machine(
    system="Linux 6.8 x86_64",
    python="3.11.2",
    versions={"torch": "2.13.0"},
    cores=64,
    memory=2**40,
    shm=2**35,
    open_files=2**16,
    environment={"OMP_NUM_THREADS": "8"},
    has_driver=True,
    cuda="12.8",
    nccl="2.27.3",
    gpus=(H100,) * 8,
)


def found(device: str = "cuda", num_ranks: int = 8, **changed: object) -> list[Finding]:
    machine = dataclasses.replace(WELL, **changed)  # type: ignore[arg-type]
    return find(machine, num_ranks=num_ranks, device=device)


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    assert found() == []
    without = {"gpus": (), "has_driver": False, "cuda": None}
    assert found("cpu", 8, **without) == []
    # A CUDA build without a GPU warns of what is no news.
    assert (
        found("cpu", 8, gpus=(), has_driver=False, torch_says=("no NVIDIA driver",))
        == []
    )


OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.mark.parametrize(
    ("changed", "what", "advice"),
    [
        (
            {"environment": {"OMP_NUM_THREADS": "8", "NCCL_P2P_DISABLE": "1"}},
            "NCCL: P2P disabled by NCCL_P2P_DISABLE=1",
            "unset it",
        ),
        (
            {"environment": {"OMP_NUM_THREADS": "8", "NCCL_SHM_DISABLE": "1"}},
            "NCCL: shared memory disabled by NCCL_SHM_DISABLE=1",
            "unset it",
        ),
        (
            {"environment": {"OMP_NUM_THREADS": "8", "CUDA_LAUNCH_BLOCKING": "1"}},
            "CUDA_LAUNCH_BLOCKING=1",
            "unset it",
        ),
        ({"no_peer_access": ((0, 1),)}, "no P2P between the GPUs 0 and 1", "topo -m"),
        ({"shm": 64 * 2**20}, "/dev/shm is 64 MB", "--shm-size=8g"),
        (
            {"environment": {"OMP_NUM_THREADS": "64"}},
            "8 ranks have 512 threads on 64 cores",
            "set it to 8",
        ),
        ({"open_files": 1024}, "a process may open 1024 files", "ulimit -n 65536"),
        (
            {"memory_limit": 16 * 2**30},
            "the control group may use 16 GiB of the machine's",
            "the kernel kills one",
        ),
        (
            {"gpus": (H100, SMALL)},
            "the GPUs are uneven (0: NVIDIA H100, 80 GiB, 1: NVIDIA A100, 40 GiB)",
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            {"gpus": (H100, BUSY)},
            "70 GiB of the 80 GiB of GPU 1 are in use",
            "nvidia-smi",
        ),
        (
            {"gpus": (), "torch_says": (OLD,)},
            "driver on your system is too old",
            "update",
        ),
        ({"gpus": (), "cuda": None}, "torch is a build without CUDA", "install a CUDA"),
        ({"gpus": ()}, "torch is built for CUDA 12.8, and sees no GPU", "--gpus all"),
        (
            {
                "gpus": (),
                "environment": {"OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": ""},
            },
            "CUDA_VISIBLE_DEVICES hides every GPU",
            "unset it",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(
    changed: dict[str, object], what: str, advice: str
) -> None:
    [finding] = found(**changed)
    assert what in finding.what
    assert advice in finding.advice


def test_idle_cores_are_worth_a_word_on_the_cpu() -> None:
    [finding] = found("cpu", 2, environment={})
    assert "a rank uses 1 thread, and has 32 cores" in finding.what
    assert "--threads 32" in finding.advice


def test_gpus_that_others_use_are_named() -> None:
    machine = dataclasses.replace(WELL, gpus=(H100, BUSY))
    assert ["GPU 1" in each.what for each in in_use(machine)] == [True]


@pytest.mark.engine  # torch, in a process of its own
def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.memory == psutil.virtual_memory().total
    assert machine.versions["torch"] in machine.describe()
    assert "torch cannot" not in " ".join(machine.torch_says)


def test_a_machine_in_a_line() -> None:
    assert WELL.describe() == (
        "64 cores, 1.02e+03 GiB, 8 x NVIDIA H100 (80 GiB); Linux 6.8 x86_64, "
        "Python 3.11.2, torch 2.13.0, CUDA 12.8, NCCL 2.27.3"
    )


# ---- the report ----


def test_a_report_for_an_issue_names_nobody() -> None:
    me, host = getpass.getuser(), socket.gethostname()
    said = f"no such file: {Path.home()}/secret/a.py on {host}, /home/ada/b by {me}"
    line = Line("ddp", "ddp", FAILED, said, details=f"{sys.prefix}/lib\n{said}")
    text = Report(WELL, [Finding(said, "mend it")], [line]).to_markdown()
    assert "~/secret/a.py" in text
    assert "PREFIX/lib" in text
    assert host not in text
    assert "ada" not in text
    assert str(Path.home()) + "/" not in text
    assert me == "root" or me not in text
    assert "OMP_NUM_THREADS=8" in text


def test_a_report_is_text_html_and_markdown() -> None:
    lines = [
        Line("start", "start", OK, "2 ranks"),
        Line("ddp", "ddp | x", FAILED, "1 < 2", details="<b>more</b>"),
        Line("kill", "kill", NOT_RUN, "no lab"),
        Line("oom", "oom", NOT_APPLICABLE, "for GPUs"),
        Line("bandwidth", "speed", LOOK, "slow", "use more"),
    ]
    report = Report(WELL, [], lines, seconds=61.0, is_whole=True)
    assert not report.is_right
    assert report.headline == (
        "labkit check: 1 right, 1 right, and worth a look, 1 failed, 1 not run, "
        "1 not applicable here; in 1 min 1 s"
    )
    text = repr(report)
    assert re.search(r"^speed +look +slow; use more$", text, re.MULTILINE)
    assert "    <b>more</b>" in text
    page = report._repr_html_()
    assert "1 &lt; 2" in page
    assert "<b>more</b>" not in page
    assert Report(WELL, [], lines[:1], is_whole=True).is_right


def test_what_crashes_over_a_backend_is_not_tried_there() -> None:
    check = CHECKS["tensor"]
    why = check.not_applicable(num_ranks=2, device="cuda", backend="gloo")
    assert "--device cpu" in why
    for device, backend in (("cuda", "nccl"), ("cpu", "gloo")):
        assert not check.not_applicable(num_ranks=2, device=device, backend=backend)
