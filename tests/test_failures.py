"""Failures caused for real: every one ends the cell, and the next one works."""

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ipyparallel
import psutil
import pytest
from interrupts import interrupt_when
from kernels import wait_until
from marks import long_but

from labkit import Lab
from labkit import RankError
from labkit import timeouts
from labkit.checks import UserError
from labkit.host.exit_cause import OTHER_COLLECTIVES
from labkit.host.exit_cause import abort_text
from labkit.host.exit_cause import crash_line
from labkit.notebook.cluster.rank_group import LabRanks
from labkit.notebook.execution import errors
from labkit.notebook.execution import stop_policy

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _ranks_have_something_to_lose(lab: Lab) -> None:
    lab.run("kept = 100 + rank")


def assert_all_is_well(lab: Lab) -> None:
    """Variables are there still, the group works, and no more than one cell ran."""
    assert lab.pull("kept", "all") == [100, 101]
    lab.run("total = torch.ones(1)\ndist.all_reduce(total)\ntotal = total.item()")
    assert lab.pull("total", "all") == [2.0, 2.0]


class Watch:
    """Stands for sys.stdout and sets an event once all ranks have said "here"."""

    def __init__(self) -> None:
        self.seen = threading.Event()

    def write(self, text: str) -> None:
        if "here" in text:
            self.seen.set()

    def flush(self) -> None:
        pass


def interrupt_cell(lab: Lab, code: str, patch: pytest.MonkeyPatch) -> float:
    """Run `code`, interrupt it once every rank has printed "here"; the seconds that
    the interrupt took."""
    watch = Watch()
    sent = 0.0

    def note_time() -> None:
        nonlocal sent
        watch.seen.wait(30)
        sent = time.monotonic()

    thread = threading.Thread(target=note_time)
    thread.start()
    with patch.context() as p, interrupt_when(watch.seen.is_set):
        p.setattr("sys.stdout", watch)
        with pytest.raises(errors.Interrupted):
            lab.run(code)
    thread.join()
    return time.monotonic() - sent


@pytest.mark.parametrize(
    "others",
    [
        "dist.all_reduce(torch.ones(1))",
        "dist.new_group([0, 1])",
        "import time; time.sleep(60)",
        "while True: pass",
        "import asyncio; await asyncio.sleep(60)",
        "!sleep 60",
        "pass",
    ],
)
def test_one_rank_that_raises_frees_the_others(lab: Lab, others: str) -> None:
    code = f"if rank == 1:\n    raise ValueError('on purpose')\n{others}"
    with pytest.raises(RankError) as caught:
        lab.run(code, timeout=30)
    error = caught.value
    assert error.rank == 1
    assert "rank 1: failed at line 2: raise ValueError" in str(error)
    assert "; ValueError: on purpose" in str(error)
    if others in ("pass", "!sleep 60"):  # IPython ends a shell command, and goes on
        assert "rank 0: finished" in str(error)
    else:
        assert "rank 0: stopped at line 3" in str(error)
        assert "because rank 1 failed" in str(error)
    assert_all_is_well(lab)


# Rank 0's failure stops rank 1, which has failed by itself when it gets to that.
DELAYED = """
import threading
from labkit.rank.engine.interrupts import CellInterrupts
plain = CellInterrupts._interrupt
asked, go, over = (threading.Event() for _ in range(3))
def late(self, *arguments):
    asked.set()
    go.wait(30)
    plain(self, *arguments)
    over.set()
CellInterrupts._interrupt = late
"""


def test_an_interrupt_that_comes_late_does_not_stop_the_next_cell(lab: Lab) -> None:
    lab.run(DELAYED, ranks=1)
    try:
        with pytest.raises(RankError) as caught:
            lab.run("if rank == 1: asked.wait(30)\nraise ValueError('on purpose')")
        assert [each.ename for each in caught.value.outcomes] == ["ValueError"] * 2
        lab.run("if rank == 1:\n    go.set()\n    assert over.wait(30)")
    finally:
        lab.run("CellInterrupts._interrupt = plain", ranks=1)
    assert_all_is_well(lab)


def test_the_first_failure_has_its_full_traceback(lab: Lab) -> None:
    code = (
        "def inner():\n    1 / 0\ndef outer():\n    inner()\n"
        "if rank == 0:\n    outer()\ndist.barrier()"
    )
    with pytest.raises(RankError) as caught:
        lab.run(code)
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(caught.value._render_traceback_()))
    for part in ("On rank 0", "inner()", "outer()", "ZeroDivisionError", "rank 1: "):
        assert part in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("lambda out, y: missing", "name 'missing' is not defined"),
        ("loss, validate=data, metrics={'a': lambda out, y: missing}", "'missing'"),
        ("lambda out, y: loss(out, y).item()", "loss_fn returned a float; it must"),
        ("lambda out, y: (out - y) ** 2", "loss_fn returned a tensor of shape (2, 1)"),
    ],
)
def test_what_fails_in_fit_is_said_under_the_users_line(
    lab: Lab, arguments: str, says: str
) -> None:
    code = (
        "loss = torch.nn.functional.mse_loss\nmodel = torch.nn.Linear(3, 1)\n"
        "data = torch.utils.data.TensorDataset(torch.ones(4, 3), torch.ones(4, 1))\n"
        "sgd = torch.optim.SGD(model.parameters())\n"
        f"fit(model, data, {arguments}, optimizer=sgd, batch_size=4)"
    )
    with pytest.raises(RankError) as caught:
        lab.train("ddp", code, live=False)
    text = errors.COLOUR.sub("", str(caught.value))
    assert says in text
    assert "line 5" in text
    assert not re.search(r"File .*labkit", text)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "pipeline"])
def test_what_fails_in_forward_is_shown_without_what_has_called_it(
    lab: Lab, strategy: str
) -> None:
    code = """
class Fails(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / int("none")
model = torch.nn.Sequential(torch.nn.Linear(3, 3), Fails(3, 1))
sgd = torch.optim.SGD(model.parameters())
data = torch.utils.data.TensorDataset(torch.ones(4, 3), torch.ones(4, 1))
model, sgd, loader = prepare(model, sgd, data, batch_size=4)
for x, y in loader:
    model(x)
"""
    with pytest.raises(RankError) as caught:
        lab.train(strategy, code, live=False)
    text = errors.COLOUR.sub("", "\n".join(caught.value._render_traceback_()))
    assert "in Fails.forward(self, x)" in text
    assert "model(x)" in text
    assert not re.search(r"File .*labkit/strategies", text)


def test_a_name_that_an_optimizer_does_not_have_is_shown_where_it_is_written(
    lab: Lab,
) -> None:
    code = """
model = torch.nn.Linear(3, 1)
sgd = torch.optim.SGD(model.parameters())
data = torch.utils.data.TensorDataset(torch.ones(4, 3), torch.ones(4, 1))
model, optimizer, loader = prepare(model, sgd, data, batch_size=4)
optimizer.zero_gard()
"""
    with pytest.raises(RankError, match="'SGD' object has no attribute") as caught:
        lab.train("ddp", code, live=False)
    text = errors.COLOUR.sub("", "\n".join(caught.value._render_traceback_()))
    assert "optimizer.zero_gard()" in text
    assert "labkit" not in text
    assert "frames)" not in text


def test_variables_that_a_failed_function_has_kept_stay(lab: Lab) -> None:
    code = """
def fail(value):
    global kept
    kept = locals()
    return value / 0
fail(3)
"""
    with pytest.raises(RankError, match="division by zero"):
        lab.run(code)
    assert lab.pull("kept") == {"value": 3}


def test_a_class_of_the_users_may_have_the_name_of_labkits(lab: Lab) -> None:
    code = """
class Session:
    def fit(self):
        return fail()
def fail():
    return 1 / 0
Session().fit()
"""
    with pytest.raises(RankError) as caught:
        lab.run(code)
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(caught.value._render_traceback_()))
    assert "in Session.fit(self)" in text


def test_the_workers_of_a_failed_loop_end_at_once(lab: Lab, capsys: Captured) -> None:
    """The collector of garbage ended the thread first that was to tell them to."""
    code = """
from torch.utils.data import DataLoader, Dataset
class Bad(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return torch.ones(1) / (index != 50 or int("none"))
for _ in DataLoader(Bad(), batch_size=4, num_workers=2):
    pass
"""
    began = time.monotonic()
    with pytest.raises(RankError, match="Caught ValueError in DataLoader worker"):
        lab.run(code)
    assert time.monotonic() - began < timeouts.STILL_RUNS_S
    assert "still run" not in capsys.readouterr().err


def test_a_failure_of_all_ranks_is_shown_once(lab: Lab) -> None:
    with pytest.raises(RankError) as caught:
        # After a barrier they fail at one time, however busy the machine is.
        lab.run("x = 1\ndist.barrier()\nx.nothing")
    assert str(caught.value).splitlines() == [
        "rank 0: failed at line 3: x.nothing; AttributeError: 'int' object has no "
        "attribute 'nothing'",
        "rank 1: the same",
    ]
    assert_all_is_well(lab)


def test_a_syntax_error_is_an_error(lab: Lab) -> None:
    with pytest.raises(RankError, match="SyntaxError"):
        lab.run("for in python")
    assert_all_is_well(lab)


@pytest.mark.parametrize("then", ["", "ip.run_cell('pass')"])
def test_a_cell_within_a_cell_that_fails_is_an_error(lab: Lab, then: str) -> None:
    with pytest.raises(RankError, match="ZeroDivisionError"):
        lab.run(f"ip = get_ipython()\nip.run_cell('1 / 0')\n{then}")
    lab.run("ip.run_cell('inner = 1')")
    assert_all_is_well(lab)


def test_raising_inside_a_collective_of_wrong_use_is_an_error(lab: Lab) -> None:
    with pytest.raises(RankError, match="rank 0"):
        lab.run("dist.all_reduce('not a tensor')")
    assert_all_is_well(lab)


def test_a_crash_in_native_code_is_a_death(lab: Lab) -> None:
    # Gloo ends the process when ranks disagree on a shape.
    code = """
def reduce(size):
    dist.all_reduce(torch.ones(size))

reduce(1000 * (rank + 1))
"""
    with pytest.raises(RankError, match=r"the process died at line 2: dist.*SIGABRT"):
        lab.run(code, timeout=20)
    assert lab.restart()
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


def test_the_line_of_a_crash_is_one_of_the_cell() -> None:
    frames = [
        '  File "/tmp/ipykernel_7/111.py", line 3 in forward',
        '  File "/tmp/ipykernel_7/222.py", line 5 in step',
        '  File "/tmp/ipykernel_7/222.py", line 9 in <module>',
        '  File "IPython/core/interactiveshell.py", line 3577 in run_code',
    ]
    other = "\n\nThread 0x07 (most recent call first):\n" + frames[0]
    main = "\n\nCurrent thread 0x08 (most recent call first):\n" + "\n".join(frames)
    crash = "Fatal Python error: Aborted"
    assert crash_line(crash + other + main) == 5
    assert crash_line(f"{crash}{main}\n  ...\n") is None  # more than it writes
    assert crash_line(crash + other + "\n...\n") is None  # of many threads some
    assert crash_line(f"Traceback:\n{frames[2]}\nKilled") is None


def test_what_native_code_said_as_it_aborted_is_quoted() -> None:
    """Within the stack that Python writes meanwhile, as in a log that was found; what
    is written last may be lost with the process."""
    log = (
        "terminate called after throwing an instance of 'int'\n"  # of its child
        "Fatal Python error: Aborted\n\n"
        '  File "ipykernel/kernelbase.py", line 508 in dispatch_shell'
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes.\n\n"
    )
    assert abort_text(log) == (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet' "
        "what(): [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes.; "
        f"{OTHER_COLLECTIVES}"
    )
    assert abort_text("Fatal Python error: Aborted\n") == ""
    cut = "terminate called after throwing an instance of 'Fatal Python error: Aborted"
    for each in (cut, "terminate called recursively"):
        assert abort_text(f"{each}\n\n") == f"terminate called; {OTHER_COLLECTIVES}"


def test_a_wrapped_model_survives_the_failure_of_a_rank(lab: Lab) -> None:
    lab.run(
        "torch.manual_seed(0)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "def gradient():\n"
        "    model.zero_grad()\n"
        "    (model(torch.ones(1, 4)) * (rank + 1)).sum().backward()\n"
        "    return model.module.weight.grad.tolist()\n"
        "before = gradient()"
    )
    with pytest.raises(RankError):
        lab.run("if rank == 0: raise RuntimeError\ndist.all_reduce(torch.ones(1))")
    lab.run("after = gradient()")
    assert lab.pull("after", "all") == lab.pull("before", "all") == [[[1.5] * 4]] * 2


def test_a_failure_without_communication_leaves_the_group_as_it_was(lab: Lab) -> None:
    lab.run("group = dist.distributed_c10d._get_default_group()")
    with pytest.raises(RankError):
        lab.run("undefined_name")
    lab.run("same = dist.distributed_c10d._get_default_group() is group")
    assert lab.pull("same", "all") == [True, True]


def test_a_group_that_a_cell_destroyed_is_formed_again(lab: Lab) -> None:
    lab.run("dist.destroy_process_group()")
    assert_all_is_well(lab)


def test_a_failed_run_is_kept_as_failed(lab: Lab) -> None:
    code = (
        "m = torch.nn.Linear(1, 1)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "for step in range(5):\n"
        "    m(torch.ones(1, 1)).sum().backward()\n    o.step()\n"
        "if rank == 1: raise ValueError\n"
        "dist.barrier()"
    )
    with pytest.raises(RankError):
        lab.train("raw", code, live=False)
    run = lab.runs[-1]
    assert run.state == "failed"
    assert run.num_steps == 5
    assert_all_is_well(lab)


def test_hooks_of_a_failed_run_are_gone(lab: Lab) -> None:
    lab.run("plain = torch.Tensor.backward")
    with pytest.raises(RankError):
        lab.train("ddp", "1 / 0", live=False)
    lab.run("same = torch.Tensor.backward is plain")
    assert lab.pull("same", "all") == [True, True]


@pytest.mark.parametrize("code", ["", "  \n", "# nothing"])
def test_a_cell_without_code_ends(lab: Lab, code: str) -> None:
    lab.run(code, timeout=10)
    assert_all_is_well(lab)


def test_a_keyboard_interrupt_of_a_ranks_own_is_a_failure(lab: Lab) -> None:
    with pytest.raises(RankError, match="rank 1: stopped at line 1"):
        lab.run("if rank == 1: raise KeyboardInterrupt")
    assert_all_is_well(lab)


def test_a_metric_that_cannot_be_drawn_does_not_end_the_run(lab: Lab) -> None:
    run = lab.train("raw", "log(loss=1e308)\nlog(loss=-1e308)")
    assert run.state == "finished"
    run.plot()


# ---- interrupts ----


@pytest.mark.parametrize(
    "waits_in",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import asyncio; await asyncio.sleep(60)",
        "import time\ndist.barrier() if rank == 0 else time.sleep(60)",
        # Neither can ever complete: the ranks sit in different collectives.
        "dist.all_reduce(torch.ones(1)) if rank == 0 else dist.broadcast_object_list("
        "[None], src=0)",
        "dist.init_process_group('gloo') if rank == 0 else dist.barrier()",
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(9, 9)) "
        "if rank == 0 else dist.recv(torch.ones(1), 0)",
        # It leaves the signal to the command.
        pytest.param(
            "import os\nos.system('sleep 60') if rank == 0 else dist.barrier()",
            marks=pytest.mark.skipif(
                sys.platform != "linux", reason="only Linux says what is ignored"
            ),
        ),
    ],
)
def test_an_interrupt_ends_the_cell_and_keeps_state(
    lab: Lab, waits_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_cell(lab, f"print('here')\n{waits_in}", monkeypatch)
    assert_all_is_well(lab)


# A signal that comes when the loop has taken the cell's next step from its queue, and
# has not begun it.
IN_THE_LOOP = """
import asyncio, signal
class Step(int):
    _cancelled = property(signal.raise_signal)  # what the loop looks at first
def replace():
    step, queue[0] = queue[0], Step(signal.SIGINT)
    queue[0]._run = step._run
loop = asyncio.get_running_loop()
queue = loop._ready
loop.call_soon(replace)
await asyncio.sleep(0)
await asyncio.sleep(60)
"""
IN_A_TASK = """
import asyncio
async def spin():
    while True: pass
task = asyncio.create_task(spin())
print('here')
await asyncio.sleep(60)
"""


def test_an_interrupt_within_the_event_loop_costs_no_step(lab: Lab) -> None:
    with pytest.raises(RankError, match="stopped at line 11"):
        lab.run(IN_THE_LOOP, ranks=0, timeout=30)
    assert_all_is_well(lab)


def test_an_interrupt_ends_a_task_that_never_awaits(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_cell(lab, IN_A_TASK, monkeypatch)
    assert_all_is_well(lab)


@pytest.mark.parametrize(
    "how",
    ["signal(signal.SIGINT, signal.SIG_IGN)", "pthread_sigmask(signal.SIG_BLOCK, [2])"],
)
def test_an_interrupt_comes_though_an_earlier_cell_wanted_none(
    lab: Lab, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.run(f"import signal; signal.{how};")
    interrupt_cell(lab, "print('here')\nimport time; time.sleep(60)", monkeypatch)
    assert_all_is_well(lab)


def test_an_interrupt_that_python_drops_comes_again(lab: Lab, capsys: Captured) -> None:
    """Raised as a generator that a loop has left is closed, it reaches nobody."""
    code = """
import os, signal, time
def batches():
    try:
        yield 1
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
for _ in batches():
    break
time.sleep(20)
print("not stopped")
"""
    with pytest.raises(RankError):
        lab.run(code)
    said = capsys.readouterr()
    assert "Exception ignored" not in said.err
    assert "not stopped" not in said.out
    assert_all_is_well(lab)


def test_an_interrupted_run_keeps_its_history(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    code = (
        "m = torch.nn.Linear(1, 1)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "step = 0\n"
        "while True:\n"
        "    m(torch.ones(1, 1)).sum().backward()\n    o.step()\n    step += 1\n"
        "    if step == 50: print('here', flush=True)"
    )
    with monkeypatch.context() as patch, interrupt_when(watch.seen.is_set):
        patch.setattr("sys.stdout", watch)
        with pytest.raises(errors.Interrupted):
            lab.train("raw", code, live=False)
    run = lab.runs[-1]
    assert run.state == "interrupted"
    assert len(run.history.query("rank == 0")) == run.collector.steps[0] >= 50
    assert_all_is_well(lab)


TRAINS_ON = """
m = torch.nn.Linear(1, 1)
o = torch.optim.SGD(m.parameters(), lr=0.01)
{prepare}
num_steps = 0
while True:
    for x, y in loader:
        torch.nn.functional.mse_loss(m(x), y).backward()
        dist.all_reduce(torch.ones(1))  # so that no rank is far ahead
        o.step()
        o.zero_grad()
        num_steps += 1
        if num_steps == 50:
            print("here", flush=True)
"""
DATA = "torch.utils.data.TensorDataset(torch.ones(16, 1), torch.ones(16, 1))"
PREPARES = {
    "ddp": f"m, o, loader = prepare(m, o, {DATA}, batch_size=8)",
    "raw": f"loader = torch.utils.data.DataLoader({DATA}, batch_size=8)",
}


@pytest.mark.parametrize("strategy", PREPARES)
def test_an_interrupted_run_ends_after_the_same_step_on_every_rank(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: Captured, strategy: str
) -> None:
    watch = Watch()
    with monkeypatch.context() as patch, interrupt_when(watch.seen.is_set):
        patch.setattr("sys.stdout", watch)
        code = TRAINS_ON.format(prepare=PREPARES[strategy])
        with pytest.raises(errors.Interrupted):
            lab.train(strategy, code, live=False)
    steps = lab.pull("num_steps", ranks="all")
    assert steps[0] == steps[1] >= 50
    assert lab.runs[-1].state == "interrupted"
    assert "no longer hold one model" not in capsys.readouterr().err
    assert_all_is_well(lab)


def test_a_cell_that_swallows_interrupts_is_reported_and_interrupted_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    code = (
        "import time\nprint('here')\n"
        "for _ in range(2):\n    try:\n        time.sleep(60)\n    except:\n"
        "        pass\ntime.sleep(60)"
    )
    interrupt_cell(lab, code, monkeypatch)
    said = capsys.readouterr().err
    assert said.count("ranks 0-1 still run 5 s after the request to stop") == 1
    assert "Interrupt once more to restart them" in said
    assert_all_is_well(lab)


def test_a_time_limit_ends_the_cell(lab: Lab) -> None:
    with pytest.raises(errors.CellTimeoutError, match="longer than 1 seconds"):
        lab.run("import time\ntime.sleep(60)", timeout=1)
    assert_all_is_well(lab)


# ---- deaths ----


@dataclass(frozen=True)
class Death:
    """What ends the processes of `ranks`, what the others do, and what is said."""

    ranks: tuple[int, ...]
    kill: str
    others: str
    said: str


DEATHS = {
    "SIGKILL, in all_reduce": Death(
        (1,),
        "subprocess.Popen(['sleep', '60']); os.kill(os.getpid(), signal.SIGKILL)",
        "dist.all_reduce(torch.ones(1))",
        # Linux counts what it kills when out of memory; macOS does not tell.
        r"killed by SIGKILL \(by (a program or by hand|hand).* with [\d.]+ [MG]iB in "
        r"use\)",
    ),
    "SIGSEGV of rank 0": Death(
        (0,),
        "ctypes.string_at(0)",
        "dist.barrier()",
        r"died at line 3: .* ctypes.string_at\(0\); .*killed by SIGSEGV \(a crash in "
        r"native code, in string_at at .*ctypes/__init__.py:\d+\)",
    ),
    "exit, in output": Death(
        (1,), "os._exit(3)", "print('x' * 10**6)", "ended with exit code 3"
    ),
    "SIGTERM, asleep": Death(
        (1,),
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        "time.sleep(60)",
        r"killed by SIGTERM \(terminated from outside\)",
    ),
    "SIGABRT of every rank": Death(
        (0, 1), "os.abort()", "pass", r"killed by SIGABRT \(native code aborted\)"
    ),
}


@pytest.mark.parametrize(
    "name",
    long_but(DEATHS, "SIGSEGV of rank 0", "exit, in output"),
)
def test_a_death_ends_the_cell_and_only_the_dead_come_back(
    lab: Lab, name: str, capsys: Captured
) -> None:
    death = DEATHS[name]
    dead, alive = list(death.ranks), [r for r in (0, 1) if r not in death.ranks]
    pids = lab.status()["pid"]
    code = (
        "import ctypes, os, signal, subprocess, time\n"
        f"if rank in {dead}:\n    print('goodbye'); {death.kill}\n{death.others}"
    )
    with pytest.raises(RankError, match=death.said) as caught:
        lab.run(code, timeout=30)
    assert capsys.readouterr().out.count("goodbye") == 1  # printed a moment before
    first = [rf"rank {rank}: the process died\b.* pid {pids[rank]}, " for rank in dead]
    assert re.match("|".join(first), str(caught.value))
    status = lab.status()
    assert list(status["state"][dead]) == ["dead"] * len(dead)
    assert list(status["state"][alive]) == ["idle"] * len(alive)
    with pytest.raises(RuntimeError, match=r"dead since \d\d:\d\d:\d\d: pid .*restart"):
        lab.run("1")
    for rank in alive:
        assert lab.pull("kept", rank) == 100 + rank
    assert lab.restart() == dead
    after = lab.status()["pid"]
    assert [rank for rank in (0, 1) if after[rank] == pids[rank]] == alive
    children = psutil.Process().children(recursive=True)
    assert not [c for c in children if "sleep" in c.cmdline()]
    for rank in alive:
        assert lab.pull("kept", rank) == 100 + rank
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 900 MB; skips where this process may not make one."""
    told = Path("/proc/self/cgroup").read_text().splitlines()
    groups = {names: path for _, names, path in (line.split(":", 2) for line in told)}
    if "memory" in groups:
        parent = Path("/sys/fs/cgroup/memory" + groups["memory"])
        limit = "memory.limit_in_bytes"
    else:
        parent = Path("/sys/fs/cgroup" + groups.get("", "/"))
        limit = "memory.max"
    group = parent / f"labkit-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(900 * 10**6))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_rank_that_ran_out_of_memory_is_distinguished_from_one_that_was_killed(
    lab: Lab, small_group: Path
) -> None:
    (small_group / "cgroup.procs").write_text(str(lab.status()["pid"][1]))
    code = (
        "import time\nhoard = []\n"
        "while rank == 1:\n    hoard.append(torch.ones(10**7))\n    time.sleep(0.02)\n"
        "dist.barrier()"
    )
    said = r"rank 1: .*SIGKILL \(by the kernel, out of memory, with .*858 MiB"
    with pytest.raises(RankError, match=said):
        lab.run(code, timeout=40)
    assert "by the kernel, out of memory" in lab.status()["cause"][1]
    assert lab.restart() == [1]
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


def test_a_rank_that_dies_while_idle_is_found_out(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run("from math import log")
    pid = int(lab.status()["pid"][0])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: lab.status()["state"][0] == "dead", 10, "the death is unnoticed")
    said = rf"rank 0: dead since \d\d:\d\d:\d\d: pid {pid}, killed by SIGKILL .*restart"
    with pytest.raises(RuntimeError, match=said):
        lab.run("1")
    assert lab.pull("kept", 1) == 101
    for ranks, is_full in (("all", False), (1, True)):
        with pytest.raises(RuntimeError, match=said):
            lab.pull("kept", ranks, full=is_full)
    assert lab.restart() == [0]
    # A cell would run with another function there, where any other name is missing.
    said = "labkit: log is your own on rank 1, and labkit's on rank 0: the cell"
    assert said in capsys.readouterr().err
    lab.run("from math import log")
    lab.run("assert log(1) == 0; del log; kept = 100 + rank")
    assert_all_is_well(lab)


SETTINGS = """
found = [
    torch.is_grad_enabled(),
    torch.is_inference_mode_enabled(),
    torch.is_autocast_enabled("cpu"),
    torch._C._len_torch_dispatch_stack(),
    torch._C._len_torch_function_stack(),
    len(torch.nn.modules.module._global_forward_hooks),
]
"""


@pytest.mark.parametrize(
    "context",
    [
        "torch.autocast('cpu')",
        "torch.no_grad()",
        "torch.inference_mode()",  # which ends by itself, with what holds it
        "FlopCounterMode(display=False)",
    ],
)
def test_a_failed_cell_leaves_no_context_entered(lab: Lab, context: str) -> None:
    """An interrupt that comes with the error is raised in `__exit__`, which comes next:
    autocast would be on in all later cells, of that rank alone."""
    lab.run("from torch.utils.flop_counter import FlopCounterMode")
    lab.run(SETTINGS)
    before = lab.pull("found", "all")
    with pytest.raises(RankError):
        lab.run(f"""
            def wait():
                1 / (1 - rank)
                dist.broadcast(torch.ones(3), 1, async_op=True).wait()
            with {context}:
                wait()
            """)
    lab.run(SETTINGS)
    assert lab.pull("found", "all") == before


def test_a_mesh_that_the_collector_does_not_list_is_given_todays_groups(
    lab: Lab,
) -> None:
    """`gc.freeze` hides it, and what DTensor has remembered of it."""
    lab.run("""
        import gc
        from torch.distributed.tensor import Shard, distribute_tensor

        def norm():
            sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
            return torch.linalg.vector_norm(sharded).full_tensor().item()

        others = [dist.new_group() for _ in range(3)]  # its names are not there again
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s"))
        before = norm()
        gc.freeze()
        del others
        """)
    with pytest.raises(RankError):
        lab.run("1 / rank; dist.barrier()")
    lab.run("same = norm()")
    lab.run("""
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s"))
        new = norm()
        """)
    assert lab.pull("same") == lab.pull("new") == lab.pull("before")


FREEZE = "import gc\nfrom labkit.rank.group.recovery import freeze_libraries\n"


def test_the_few_objects_that_a_cell_freezes_are_listed_again(lab: Lab) -> None:
    lab.run(FREEZE + "junk = [[] for _ in range(100_000)]\nfreeze_libraries()")
    lab.run("del junk\ngc.freeze()")
    with pytest.raises(RankError):
        lab.run("1 / rank; dist.barrier()")
    lab.run("num_frozen = gc.get_freeze_count()")
    assert lab.pull("num_frozen", "all") == [0, 0]


@pytest.mark.long
def test_deepspeed_copies_the_group_on_all_ranks_whatever_each_has_frozen(
    lab: Lab,
) -> None:
    """As after a cell that calls `gc.unfreeze`, and the restart of one rank."""
    train = """
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = [(torch.ones(4), torch.ones(4))] * 8
        model, optimizer, loader = prepare(net, optimizer, data, batch_size=4)
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    lab.run(FREEZE + "freeze_libraries()")
    lab.train("zero1", train, live=False)
    lab.run("if rank == 0:\n    gc.unfreeze()")
    with pytest.raises(RankError):
        lab.run("1 / rank; dist.barrier()")
    lab.train("zero1", train, live=False, timeout=30)


@pytest.mark.parametrize("rank", long_but([0, 1], 1))
def test_a_death_while_the_group_is_formed_leaves_nobody_waiting(
    lab: Lab, rank: int
) -> None:
    pid = lab.status()["pid"][rank]
    code = (
        "import os, signal\nfrom labkit.rank.group import process_group\n"
        f"if rank == {rank}:\n"
        "    process_group._torch_init_process_group = "
        "lambda *args, **more: os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.destroy_process_group()"
    )
    with pytest.raises(RuntimeError, match=rf"rank {rank} died: pid {pid}, .*SIGKILL"):
        lab.run(code)
    assert lab.restart() == [rank]
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


AS_THE_GROUP_FORMS = """
import signal
from pathlib import Path
from labkit.rank.group import process_group
init = process_group._torch_init_process_group
def stop(*args, store, **more):
    process_group._torch_init_process_group = init
    {how}
if rank == {rank}:
    process_group._torch_init_process_group = stop
"""


def test_a_rank_that_raises_while_the_group_is_formed_leaves_nobody_waiting(
    lab: Lab,
) -> None:
    code = AS_THE_GROUP_FORMS.format(rank=1, how="raise OSError('on purpose')")
    with pytest.raises(RuntimeError, match="on rank 1: OSError: on purpose; %dist_res"):
        lab.run(code + "dist.destroy_process_group()")
    assert_all_is_well(lab)


def test_an_interrupt_while_the_group_is_formed_leaves_nobody_waiting(
    lab: Lab, tmp_path: Path
) -> None:
    path = tmp_path / "waiting"
    how = f"Path({str(path)!r}).touch(); store.get('what nobody sets')"
    lab.run(AS_THE_GROUP_FORMS.format(rank=0, how=how))
    with pytest.raises(RankError, match="rank 1: the process died"):
        lab.run("import os\nif rank == 1: os.kill(os.getpid(), 9)")
    with pytest.raises(KeyboardInterrupt), interrupt_when(path.exists):
        lab.restart()
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


@pytest.mark.parametrize("moment", long_but(["end", "start"], "end"))
def test_a_restart_of_all_that_was_interrupted_goes_on_with_the_next(
    lab: Lab, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = lab._ranks.cluster

    def interrupted(self: LabRanks) -> None:
        raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        if moment == "start":
            patch = stack.enter_context(monkeypatch.context())
            patch.setattr(LabRanks, "_form", interrupted)
        else:
            stack.enter_context(interrupt_when(lambda: bool(former.is_ended)))
        with pytest.raises(KeyboardInterrupt):
            lab.restart(everyone=True)
    said = r"no rank runs: .*; %dist_restart .*starts them"
    assert re.search(said, lab.status()["cause"][0])
    for use in (lambda: lab.run("1"), lab.check):
        with pytest.raises(RuntimeError, match=said):
            use()
    assert lab.restart() == [0, 1]
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


def test_a_lab_whose_folder_was_tidied_up_says_what_starts_ranks_again(
    lab: Lab,
) -> None:
    shutil.rmtree(lab._ranks.cluster.folder)
    assert_all_is_well(lab)
    with pytest.raises(RankError, match="rank 1: the process died"):
        lab.run("import os\nif rank == 1: os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match=r"folder .* was removed, .* --all"):
        lab.restart()
    assert lab.pull("kept") == 100
    assert lab.restart(everyone=True) == [0, 1]
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


def test_a_restart_of_all_that_cannot_be_ends_no_rank(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(UserError, match="the working directory has been deleted"):
        lab.restart(everyone=True)
    assert_all_is_well(lab)


ALONE_IN_NEW_GROUP = "import os, time\nif rank == 0:\n    dist.new_group([0, 1])\n"


def test_an_interrupt_ends_a_new_group_that_one_rank_alone_makes(lab: Lab) -> None:
    with pytest.raises(errors.CellTimeoutError, match="rank 0: stopped at line 3"):
        lab.run(ALONE_IN_NEW_GROUP + "else: time.sleep(60)", timeout=0.5)
    lab.run("group = dist.new_group([0, 1])\ndist.barrier(group)")
    assert_all_is_well(lab)


@pytest.mark.parametrize("rank", long_but([0, 1], 1))
def test_a_death_ends_a_new_group_that_the_others_make(lab: Lab, rank: int) -> None:
    code = "import os\nif rank == {0}: os.kill(os.getpid(), 9)\ndist.new_group([0, 1])"
    with pytest.raises(RankError, match=f"rank {rank}: the process died"):
        lab.run(code.format(rank), timeout=30)
    assert lab.restart() == [rank]
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


LEAVES_A_CHILD = """
import os, signal, time
kept = 100 + rank
dist.barrier()
if rank == 1:
    if os.fork() == 0:  # as a DataLoader's worker, it has the connections as well
        time.sleep(30)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


def test_a_death_frees_the_others_though_a_child_has_its_connections(
    lab: Lab,
) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1: the process died"):
        lab.run(LEAVES_A_CHILD, timeout=60)
    assert time.monotonic() - began < 25, "the child's end has freed it"
    assert lab.restart() == [1]
    assert lab.pull("kept", 0) == 100
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


def test_the_controller_forgets_a_rank_that_has_died(lab: Lab) -> None:
    # Or what it was asked would wait for an answer, for as long as the lab lives.
    client = lab._ranks.cluster._client
    known = set(client.ids)
    question = lab._ranks.cluster.begin("time:sleep", 60, ranks=[1])
    os.kill(int(lab.status()["pid"][1]), signal.SIGKILL)
    with pytest.raises(ipyparallel.error.CompositeError, match=r"EngineError.* died"):
        question.get(timeout=10)
    assert len(known & set(client.ids)) == 1
    assert lab.restart() == [1]
    assert len(client.ids) == 2
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


BUSY_CONTROL_THREAD = """
import threading
from IPython import get_ipython
ended = threading.Event()
if rank == 1:
    get_ipython().kernel.control_thread.io_loop.add_callback(ended.wait)
print('here', flush=True)
try:
    while not ended.is_set(): pass
finally:
    ended.set()
"""


@pytest.mark.long
def test_a_rank_that_requests_do_not_reach_is_stopped_all_the_same(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = interrupt_cell(lab, BUSY_CONTROL_THREAD, monkeypatch)
    alone_s = timeouts.ASK_AGAIN_S * stop_policy.NUM_ASKED_ALONE
    assert alone_s < seconds < timeouts.ASK_AGAIN_S * stop_policy.NUM_ASKED
    assert list(lab.status()["state"]) == ["idle", "idle"]
    assert_all_is_well(lab)


def find_children(name: str) -> list[psutil.Process]:
    """The children of this process whose command has `name` in it, oldest first."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended just now
            if any(name in word for word in child.cmdline()):
                found.append(child)
    return found


@pytest.mark.long
def test_the_death_of_the_controller_is_reported_and_all_can_start_again(
    lab: Lab,
) -> None:
    pids = set(lab.status()["pid"])
    controller = psutil.Process(lab._ranks.cluster._controller.pid)
    timer = threading.Timer(0.5, controller.kill)
    timer.start()
    said = rf"controller.* died at .*pid {controller.pid}, killed by SIGKILL.*--all"
    with pytest.raises(RuntimeError, match=said):
        lab.train("raw", "import time\ntime.sleep(60)", timeout=30, live=False)
    timer.join()
    assert lab.runs[-1].state == "failed"
    status = lab.status()
    assert list(status["state"]) == ["unreachable"] * 2
    assert re.search(said, status["cause"][1])
    for use in (lambda: lab.run("1"), lab.restart, lab.check):
        with pytest.raises(RuntimeError, match=said):
            use()
    assert lab.restart(everyone=True) == [0, 1]
    assert not pids & set(lab.status()["pid"])
    lab.run("kept = 100 + rank")
    assert_all_is_well(lab)


def test_a_watchdog_that_was_killed_is_replaced(lab: Lab) -> None:
    before = find_children("watchdog.py")
    before[-1].kill()
    wait_until(
        lambda: set(find_children("watchdog.py")) - set(before), 10, "there is no other"
    )
    assert_all_is_well(lab)
