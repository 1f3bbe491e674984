"""Hangs caused for real: it is said where every rank stands, and all of them end."""

import dataclasses
import linecache
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from kernels import Kernel
from kernels import wait_until
from marks import long_but
from test_cell_end import assert_group_works

from labkit import Lab
from labkit import RankError
from labkit import timeouts
from labkit.checks import UserError
from labkit.host import watchdog
from labkit.notebook.diagnostics.stacks import Stacks
from labkit.notebook.diagnostics.stacks import deadlocks
from labkit.notebook.diagnostics.stacks import read_dump
from labkit.notebook.execution import errors
from labkit.notebook.execution.stop_policy import StopPolicy
from labkit.records import Call
from labkit.records import Frame
from labkit.records import Position

pytestmark = pytest.mark.timeout(90)

NOTE = "No step and no collective has finished"

# Locks a mutex twice, with the GIL held all the while: no signal ends that.
HOLD_THE_GIL = """
import ctypes
def hold():
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex), c.pthread_mutex_lock(mutex)
if rank == 1: hold()
dist.barrier()
"""


class Listener:
    """Stands for a stream; calls `answer` each time that `word` is written to it."""

    def __init__(self, word: str, answer: Callable[[], None]) -> None:
        self.text = ""
        self._word = word
        self._answer = answer
        self._num_heard = 0

    def write(self, text: str) -> None:
        self.text += text
        while self.text.count(self._word) > self._num_heard:
            self._num_heard += 1
            self._answer()

    def flush(self) -> None:
        pass


def interrupt() -> None:
    """As the stop button does."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def until_noted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Does what hangs, interrupts it at the note, and returns what was noted."""

    def do_and_listen(do: Callable[[], Any], word: str = NOTE) -> str:
        listener = Listener(word, interrupt)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", listener)
            with pytest.raises(errors.Interrupted):
                do()
        return listener.text

    return do_and_listen


def test_an_interrupt_whose_handler_is_slow_is_not_lost(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the notebook waits for the ranks, and takes longer than that."""
    stop = StopPolicy.interrupt

    def slow(self: StopPolicy, now: float) -> None:
        time.sleep(3 * timeouts.POLL_S)
        stop(self, now)

    def interrupt_the_wait() -> None:
        main = threading.main_thread().ident or 0
        at: tuple[Any, int] | None = None
        while True:
            last, frame = at, sys._current_frames()[main]
            at = frame, frame.f_lineno
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if at == last and re.search(r"get\(timeout|acquire\(True", line):
                return interrupt()
            time.sleep(timeouts.QUICK_POLL_S)

    monkeypatch.setattr(StopPolicy, "interrupt", slow)
    listener = Listener("here", threading.Thread(target=interrupt_the_wait).start)
    monkeypatch.setattr("sys.stdout", listener)
    with pytest.raises(errors.Interrupted):
        lab.run("import time\nprint('here')\ntime.sleep(600)")
    assert_group_works(lab)


# ---- the note ----


@pytest.mark.parametrize(
    ("code", "noted"),
    [
        (
            "def spin():\n    while True: pass\n"
            "dist.barrier() if rank == 0 else spin()",
            r"rank 0: barrier #(\d+) at line 3: .*\n"
            r"rank 1: not in a collective(, computing)?, at line 2: while True: pass\n"
            r"rank 1 has not come to barrier #\1\n",
        ),
        (  # in the reducer, of which Python has no frame
            "import time\nmodel = torch.nn.parallel.DistributedDataParallel(\n"
            "    torch.nn.Linear(512, 512))\n"
            "loss = model(torch.ones(2, 512)).sum()\nif rank: time.sleep(60)\n"
            "loss.backward()",
            r"rank 0: all_reduce #\d+ of 1 MiB at line 6: loss.backward\(\)\n"
            r"rank 1: not in a collective, at line 5: if rank: time.sleep\(60\)\n",
        ),
        (
            "if rank == 0: dist.new_group([0, 1])\nelse: dist.recv(torch.ones(3), 0)",
            r"the ranks do not agree: rank 0 waits in new_group, "
            r"rank 1 in recv from rank 0",
        ),
        (
            "import tempfile\nfrom torch.utils.file_baton import FileBaton\n"
            "kept_file = tempfile.NamedTemporaryFile()\n"
            "FileBaton(kept_file.name).wait()",
            r"ranks 0-1: waits for another process to build a C\+\+ ext.* line 4",
        ),
        (
            "import time\nfrom labkit.strategies.mesh.peers import Peers\n"
            "if rank: time.sleep(60)\nPeers(rank, 2, device).agree_on(1, apart=True)",
            r"rank 0: waits to compare with other ranks .* line 4",
        ),
    ],
    ids=["loop", "reducer", "new_group", "build", "comparison"],
)
def test_a_note_says_where_every_rank_stands(
    lab: Lab, code: str, noted: str, until_noted: Callable[..., str]
) -> None:
    lab.run("kept = 1")
    text = until_noted(lambda: lab.run(code, hang_after=0.6))
    assert re.search(noted, text), text
    assert lab.pull("kept", "all") == [1, 1]
    assert_group_works(lab)


THREADS = {
    "none": "",
    "at a full queue": (
        "import queue, threading\nfull = queue.Queue(1)\n"
        "def draw():\n    for batch in range(2): full.put(batch)\n"
        "threading.Thread(target=draw).start()\n"
    ),
}


@pytest.mark.parametrize("thread", THREADS)
def test_a_cell_whose_ranks_wait_for_each_other_ends(lab: Lab, thread: str) -> None:
    code = "x = torch.ones(1000)\n"
    code += "dist.all_reduce(x) if rank == 0 else dist.broadcast(x, 0)"
    lab.run(f"kept = 1\n{THREADS[thread]}")
    with pytest.raises(UserError, match="wait for each other") as caught:
        lab.run(code, hang_after=2)
    told = (
        r"rank 0: all_reduce #(\d+) of 4,000 bytes at line 2: dist.all_reduce.*\n"
        r"rank 1: broadcast #\1 of 4,000 bytes at line 2: .*\n"
        r"the ranks do not agree: rank 0 waits in all_reduce #\1, "
        r"rank 1 in broadcast #\1\nEvery rank must call the same collectives"
    )
    assert re.search(told, str(caught.value)), caught.value
    assert lab.pull("kept", "all") == [1, 1]
    if thread != "none":
        lab.run("full.get();")
    assert_group_works(lab)


LEFT = (
    r"rank 1: not in the cell\n"
    r"rank 1 is not in the cell, and does not come to all_reduce #\1\n"
)


def test_a_cell_that_a_rank_has_left_too_early_ends(lab: Lab) -> None:
    # One of the two counts that gloo keeps has these in it, and the other has not.
    send = "dist.send(x, 1) if rank == 0 else dist.recv(x, 0)"
    lab.run(f"kept = 1\nx = torch.ones(1)\nfor _ in range(3): {send}")
    with pytest.raises(UserError, match="left the cell") as caught:
        lab.run("if rank == 0: dist.all_reduce(torch.ones(2**18))", hang_after=2)
    told = r"rank 0: all_reduce #(\d+) of 1 MiB at line 1: .*\n" + LEFT
    assert re.search(told, str(caught.value)), caught.value
    assert lab.pull("kept", "all") == [1, 1]
    assert_group_works(lab)


def test_a_cell_on_one_rank_that_waits_for_another_ends(lab: Lab) -> None:
    with pytest.raises(UserError, match="rank that does not run the cell") as caught:
        lab.run("dist.all_reduce(torch.ones(2**18))", ranks="0", hang_after=2)
    told = r"rank 0: all_reduce #(\d+) of 1 MiB at line 1: .*\n" + LEFT
    assert re.search(told, str(caught.value)), caught.value
    assert "%%dist without numbers" in str(caught.value)
    assert_group_works(lab)


@pytest.mark.parametrize("strategy", long_but(["ddp", "fsdp"], "fsdp"))
def test_a_loop_that_ends_by_its_own_loss_is_told_to_decide_together(
    lab: Lab, strategy: str
) -> None:
    code = """
from labkit.data import digits
from labkit.models import mlp
model = mlp()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, sgd, loader = prepare(model, sgd, digits(), batch_size=64)
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    sgd.step()
    sgd.zero_grad()
    if loss.item() < 100 * rank:
        break
"""
    with pytest.raises(
        UserError, match=r"decide together: if stop_early\(loss\): break"
    ):
        lab.train(strategy, code, live=False, hang_after=2)
    assert lab.runs[-1].state == "failed"
    assert_group_works(lab)


def test_a_rank_that_is_late_ends_nothing(lab: Lab) -> None:
    """It leaves the cell once its collective is done, and the other goes on."""
    code = "dist.barrier()\nimport time\nif rank: time.sleep(3)"
    lab.run(code, hang_after=2)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_note_names_the_collectives_of_a_library(
    lab: Lab, strategy: str, until_noted: Callable[..., str]
) -> None:
    code = """
from labkit.data import digits
from labkit.models import mlp
model = mlp()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, sgd, loader = prepare(model, sgd, digits(), batch_size=64)
for number, (x, y) in enumerate(loader):
    while rank and number == 3: pass  # the first steps are compared
    model(x).sum().backward(); sgd.step(); sgd.zero_grad()
"""
    text = until_noted(
        lambda: lab.train(strategy, code, live=False, hang_after=1), word="model(x)"
    )
    assert re.search(r"rank 0: all_gather #\d+ of .* at line 8: model\(x\)", text), text
    assert re.search(r"rank 1 has not come to all_gather #\d+\n", text), text
    assert lab.runs[-1].state == "interrupted"
    assert_group_works(lab)


@pytest.mark.long
def test_a_note_says_that_work_continues_and_none_comes_while_it_does(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    code = (
        "import time\nfrom pathlib import Path\n"
        "deadline = time.monotonic() + 3\nis_over = torch.zeros(1)\n"
        "while not is_over:\n"  # 3 s without output, but with collectives
        "    is_over.fill_(time.monotonic() > deadline)\n"
        "    dist.broadcast(is_over, 0)\n"
        "print('noted:', flush=True)\n"
        f"while rank and not Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "dist.barrier()"
    )
    listener = Listener(NOTE, go.touch)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", listener)
        patch.setattr("sys.stdout", listener)
        lab.run(code, hang_after=1.5)
    told = r"\A.*noted:\n.*" + NOTE + r".*The ranks continue, after \d+ s\.\n\Z"
    assert re.search(told, listener.text, re.DOTALL), listener.text
    assert NOTE not in listener.text.split("noted:")[0]


@pytest.mark.parametrize("wrong", [-1, "soon", float("inf"), True])
def test_hang_after_is_a_number_of_seconds(lab: Lab, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"hang_after is .*; it must be a number of"):
        lab.run("1", hang_after=wrong)
    with pytest.raises(ValueError, match=r"hang_after is .*; it must be a number of"):
        lab.train("ddp", "1", hang_after=wrong)


def test_a_rank_that_cannot_say_where_it_is_is_still_watched(
    lab: Lab, until_noted: Callable[..., str]
) -> None:
    code = (
        "import time\nfrom labkit.rank.engine import requests\n"
        "kept = requests.position\n"
        "if rank == 1: requests.position = None\n"
        "try: time.sleep(60)\n"
        "finally: requests.position = kept"
    )
    text = until_noted(lambda: lab.run(code, hang_after=0.5))
    assert "rank 0: not in a collective, at line 5: try: time.sleep(60)" in text
    assert "rank 1: did not report where it is: rank 1 cannot answer 'stack': " in text
    assert_group_works(lab)


# ---- what does not stop ----


def test_a_rank_that_holds_the_gil_is_restarted(
    lab: Lab, until_noted: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "ASK_AGAIN_S", 0.2)
    pids = lab.status()["pid"]
    lab.run("kept = 1")
    text = until_noted(lambda: lab.run(HOLD_THE_GIL, hang_after=0.6))
    assert "rank 1: does not answer: native code holds the GIL" in text
    assert re.search(r"uses \d+% of a core, at a cell, line 4\n", text), text
    assert lab.status()["pid"][0] == pids[0]
    assert lab.status()["pid"][1] != pids[1]
    assert lab.pull("kept") == 1
    with pytest.raises(NameError, match="rank 1: no variable 'kept'"):
        lab.pull("kept", 1)
    assert_group_works(lab)


@pytest.mark.long
def test_a_second_interrupt_restarts_a_rank_that_continues(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "kept = 1\nimport time\n"
        "while rank == 0:\n"
        "    try:\n        print('here', flush=True)\n        time.sleep(60)\n"
        "    except BaseException: pass\n"
        "dist.barrier()"
    )
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Listener("here", interrupt))
        with pytest.raises(errors.Interrupted) as caught:
            lab.run(code)
    assert str(caught.value) == (
        "Interrupted; every rank but rank 0 keeps its variables.\n"
        "rank 0: did not stop and was restarted: its variables are gone\n"
        "rank 1: stopped at line 8: dist.barrier()"
    )
    assert lab.pull("kept", 1) == 1
    assert_group_works(lab)


def test_a_key_pressed_twice_restarts_nothing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_twice() -> None:
        interrupt()
        interrupt()

    pids = list(lab.status()["pid"])
    code = (
        "import time\nprint('here', flush=True)\n"
        "try:\n    time.sleep(60)\nfinally:\n    time.sleep(1)"
    )
    with monkeypatch.context() as patch:
        # Not those of a user: a rank of a busy machine needs longer than it sleeps.
        patch.setattr(timeouts, "SECOND_AFTER_S", 20.0)
        patch.setattr("sys.stdout", Listener("here", press_twice))
        with pytest.raises(errors.Interrupted, match="every rank keeps its variables"):
            lab.run(code)
    assert list(lab.status()["pid"]) == pids


def test_a_rank_that_continued_into_a_collective_is_freed_from_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import time\nkept = 1\nprint('here', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n"
        "    dist.recv(torch.ones(1), 1 - rank)"
    )
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Listener("here", interrupt))
        with pytest.raises(errors.Interrupted, match="every rank keeps its variables"):
            lab.run(code)
    assert lab.pull("kept", "all") == [1, 1]
    assert_group_works(lab)


def test_a_rank_that_outlives_the_failure_of_another_is_restarted(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "ASK_AGAIN_S", 0.2)
    code = "if rank == 0: raise ValueError('on purpose')" + HOLD_THE_GIL
    with pytest.raises(RankError) as caught:
        lab.run(code)
    assert caught.value.rank == 0
    assert "rank 1: did not stop and was restarted" in str(caught.value)
    assert_group_works(lab)


# ---- %dist_stack ----


def test_idle_and_dead_ranks_are_said_to_be(lab: Lab) -> None:
    assert repr(lab.stack()) == "ranks 0-1: idle"
    process = psutil.Process(int(lab.status()["pid"][1]))
    process.kill()
    process.wait(10)
    assert repr(lab.stack()) == (
        "rank 0: idle\nrank 1: dead; %dist_restart brings it back"
    )


@pytest.mark.long
def test_dist_stack_and_the_note_of_a_run_in_the_background(
    kernel: Kernel, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    number = int(kernel.run("print(len(In))").stdout)  # of the next cell
    begun = kernel.run(
        "%%dist_train raw --background --no-live --hang-after 1\n"
        "import time\nfrom pathlib import Path\n"
        "def wait_for_it():\n"
        f"    while not Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "if rank: wait_for_it()\n"
        "dist.barrier()\n"
    )
    assert begun.status == "ok", begun
    began_by = kernel.last_request
    notes: list[str] = []

    def take(message: dict[str, Any]) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        if kind in ("display_data", "update_display_data"):
            assert message["parent_header"]["msg_id"] == began_by
            notes.append(content["data"]["text/plain"])
            assert set(content["data"]) == {"text/plain", "text/html"}

    def noted() -> bool:
        kernel.take_waiting(take)
        return bool(notes)

    wait_until(noted, 30, "a note")
    assert NOTE in notes[0]
    assert "rank 0: barrier #" in notes[0]
    assert "stop() of the Run ends this on every rank" in notes[0]

    shown = kernel.run("%dist_stack").result
    text, page = shown["text/plain"], shown["text/html"]
    assert re.search(
        rf"rank 0: barrier #\d+ at Cell In\[{number}\], line 7: dist.barrier\(\)\n"
        rf"    Cell In\[{number}\], line 7, in <module>: dist.barrier\(\)\n"
        r"    torch/distributed/distributed_c10d.py:\d+, in barrier: .*\n"
        rf"rank 1: not in a collective, at Cell In\[{number}\], line 5: while not .*\n"
        rf"    Cell In\[{number}\], line 6, in <module>: if rank: wait_for_it\(\)\n"
        rf"    Cell In\[{number}\], line 5, in wait_for_it: while not .*\n"
        r"(    pathlib.*\n)?"
        r"rank 1 has not come to barrier #\d+",
        text,
    ), text
    assert page.startswith("<table>")
    assert "&lt;module&gt;" in page
    full = kernel.run("%dist_stack --full").result["text/plain"]
    assert "torch/distributed/c10d_logger.py" in full
    assert "torch/distributed/c10d_logger.py" not in text

    go.touch()
    # A client drops what comes for another cell than the one that it waits for.
    wait_until(lambda: noted() and "continue" in notes[-1], 10, "the end of the note")
    ended = kernel.run("import labkit\nlabkit.current_lab().runs[-1].wait()")
    assert ended.status == "ok", ended
    idle = kernel.run("%dist_stack").result["text/plain"]
    assert idle == "ranks 0-1: idle"


# ---- the words ----


def waits(rank: int, *call: Any, started: int = 0) -> Position:
    """A rank in this call, or in none, that has started so many collectives."""
    at = [Frame("Cell In[1], line 1", "<module>", "run()", is_users=True)]
    here = Call(*call) if call else None
    return Position(rank, frames=at, call=here, started={"0": started})


@pytest.mark.parametrize(
    ("positions", "told"),
    [
        ([waits(0, "all_reduce", 3, 8, "0", started=3) for rank in (0, 1)], []),
        (
            [waits(0, "all_reduce", 3, 8, "0"), waits(1, "all_reduce", 3, 16, "0")],
            [
                "the ranks do not agree: rank 0 waits in all_reduce #3 of 8 bytes, "
                "rank 1 in all_reduce #3 of 16 bytes"
            ],
        ),
        (  # the root of a gather has more to hold than others
            [waits(0, "gather", 3, 16, "0"), waits(1, "gather", 3, 8, "0")],
            [],
        ),
        (
            [
                waits(0, "all_reduce", 3, 8, "0", started=3),
                *(waits(rank, started=2) for rank in (1, 2, 3)),
                waits(4, started=3),
            ],
            ["ranks 1-3 have not come to all_reduce #3"],
        ),
        (
            [waits(0, "all_reduce", 3, 8, "0", [0, 2]), *(waits(r) for r in (1, 2))],
            ["rank 2 has not come to all_reduce #3 of ranks 0,2"],
        ),
        ([waits(0, "send to rank 1"), waits(1, "recv from rank 0")], []),
        ([waits(0, "send to rank 1"), waits(1)], []),
    ],
)
def test_mismatches_are_reported(positions: list[Position], told: list[str]) -> None:
    assert Stacks(positions, {}).mismatches == told


def test_ranks_that_wait_for_each_other_are_told_from_one_that_is_late() -> None:
    def at(rank: int, kind: str, number: int, group: str, started: int) -> Position:
        call = Call(kind, number, group=group)
        return Position(rank, call=call, started={group: number, "other": started})

    gather, reduce = at(0, "all_gather", 3, "0", 0), at(1, "all_reduce", 3, "0", 0)
    assert deadlocks([gather, reduce]) == [
        "rank 0 waits in all_gather #3, and rank 1 in all_reduce #3"
    ]
    assert not deadlocks([gather, at(1, "all_gather", 3, "0", 0)])
    sizes = [dataclasses.replace(reduce.call, num_bytes=size) for size in (8, 16)]
    assert deadlocks([Position(rank, call=sizes[rank]) for rank in (0, 1)]) == [
        "rank 0 waits in all_reduce #3 of 8 bytes, and rank 1 in all_reduce #3 of 16 "
        "bytes"
    ]
    assert not deadlocks([Position(rank, call=sizes[0]) for rank in (0, 1)])
    assert not deadlocks([gather, at(1, "all_reduce", 2, "0", 0)])
    assert not deadlocks([gather, Position(1, started={"0": 2})])
    late = Position(1, call=Call("all_reduce", 1, group="a"), started={"a": 1, "0": 2})
    first = Position(0, call=Call("all_gather", 3, group="0"), started={"0": 3, "a": 0})
    assert len(deadlocks([first, late])) == 1
    saving = dataclasses.replace(first, is_alone=False)
    assert not deadlocks([saving, late])
    first.started["a"] = 1
    assert not deadlocks([first, late])


def test_a_cell_with_a_thread_in_a_collective_of_its_own_goes_on(lab: Lab) -> None:
    code = """
        import threading, time
        group = dist.new_group([0, 1])

        def save():
            time.sleep(6 * rank)
            dist.all_reduce(torch.ones(1), group=group)

        thread = threading.Thread(target=save)
        thread.start()
        time.sleep(0 if rank else 5)
        dist.barrier()
        thread.join()
        done = 1
        """
    lab.run(textwrap.dedent(code), hang_after=2)
    assert lab.pull("done", "all") == [1, 1]


def test_a_cell_that_does_other_things_during_a_collective_goes_on(lab: Lab) -> None:
    code = """
        import time
        one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        x = torch.ones(1)
        if rank == 0:
            work = dist.all_reduce(x, group=one, async_op=True)
            time.sleep(5)
            dist.all_reduce(torch.ones(1), group=other)
            work.wait()
        else:
            dist.all_reduce(torch.ones(1), group=other)
            dist.all_reduce(x, group=one)
        done = x.item()
        """
    lab.run(textwrap.dedent(code), hang_after=2)
    assert lab.pull("done", "all") == [2, 2]


def test_a_cell_that_waits_in_two_groups_at_once_ends(lab: Lab) -> None:
    code = """
        groups = dist.new_group([0, 1]), dist.new_group([0, 1])
        x = torch.ones(1)
        work = dist.all_reduce(x, group=groups[rank], async_op=True)
        work.wait()
        """
    with pytest.raises(UserError, match="wait for each other"):
        lab.run(textwrap.dedent(code), hang_after=2)


def test_a_cell_that_waits_in_the_reducer_of_ddp_ends(lab: Lab) -> None:
    code = """
        m = torch.nn.Linear(2, 1)
        o = torch.optim.SGD(m.parameters(), lr=0.1)
        m, o, loader = prepare(m, o, torch.randn(8, 2), batch_size=2)
        for x in loader:
            m(x).mean().backward()
            o.step()
            if rank == 0:
                dist.barrier()
        """
    with pytest.raises(UserError, match=r"rank 0 waits in barrier .* in broadcast"):
        lab.train("ddp", textwrap.dedent(code), hang_after=2, live=False)


def test_a_dump_begins_at_the_cell() -> None:
    dump = (
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/x/site-packages/torch/serialization.py", line 9 in load\n'
        '  File "/tmp/ipykernel_12/34.py", line 2 in inner\n'
        '  File "/tmp/ipykernel_12/56.py", line 7 in <module>\n'
        '  File "/x/site-packages/IPython/core/shell.py", line 1 in run_code\n'
    )
    assert [(f.place, f.function, f.is_users) for f in read_dump(dump)] == [
        ("a cell, line 7", "<module>", True),
        ("a cell, line 2", "inner", True),
        ("/x/site-packages/torch/serialization.py:9", "load", False),
    ]


def test_a_stack_in_an_import_ends_at_the_users_line() -> None:
    dump = (
        '  File "<frozen importlib._bootstrap>", line 241 in _find_and_load\n'
        '  File "/usr/lib/python3.11/importlib/__init__.py", line 126 in run\n'
        '  File "/home/me/mine.py", line 3 in <module>\n'
    )
    frames = read_dump(dump)
    assert [frame.is_users for frame in frames] == [True, False, False]
    positions = [Position(0, frames=[frames[0], frames[2]])]
    assert "<frozen" not in repr(Stacks(positions, {}))
    assert "<frozen" in repr(Stacks(positions, {}, is_full=True))


def test_code_and_names_in_stacks_are_no_html() -> None:
    script = "<script>alert(1)</script>"
    found = [Position(0, frames=[Frame(script, script, script, is_users=True)])]
    stacks = Stacks(found, {1: script}, is_full=True)
    assert script in repr(stacks)
    assert "<script" not in stacks._repr_html_()


# ---- what does not run for a while ----


@pytest.mark.long
@pytest.mark.parametrize("who", ["all", "an engine", "the controller"])
def test_a_run_survives_that_its_processes_are_suspended(lab: Lab, who: str) -> None:
    cluster = lab._running().cluster
    processes = watchdog.find_processes(cluster.host.token)
    if who != "all":
        engine, controller = cluster.pids[1], cluster._controller
        assert controller is not None
        pid = engine if who == "an engine" else controller.pid
        processes = [psutil.Process(pid)]
    code = (
        "import time\nfor step in range(400):\n"
        "    dist.all_reduce(torch.ones(1))\n    log(x=step, step=step)\n"
        "    time.sleep(0.01)"
    )
    run = lab.train("raw", code, background=True, live=False)
    wait_until(lambda: run.num_steps > 20, 20, "it has begun")
    try:
        for process in processes:
            process.suspend()
        time.sleep(8)  # longer than any poll
    finally:
        for process in processes:
            process.resume()
    assert run.wait(60).state == "finished"
    for rank in (0, 1):
        assert run.collector.series(rank, "x")["step"].tolist() == list(range(400))
    lab.run("dist.barrier()")
