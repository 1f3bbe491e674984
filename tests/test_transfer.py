"""Variables copied between notebook and ranks, for as long as the ranks answer."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupt_when

from labkit import Lab
from labkit import serialization
from labkit import timeouts
from labkit.checks import UserError
from labkit.notebook.cluster import transfer
from labkit.notebook.cluster.engines import Cluster
from labkit.notebook.cluster.reach import SilenceWatch

pytestmark = pytest.mark.timeout(120)

Captured = pytest.CaptureFixture[str]

SLOW = """
import time

def slowly(value):
    time.sleep(3)
    return value

class Slow:
    def __reduce__(self):
        return slowly, (5,)

class SlowToPull:
    def __reduce__(self):
        time.sleep(3)
        return int, (5,)

slow = SlowToPull()
"""


OPENED = """
import os
opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
"""


def files_of(lab: Lab) -> list[Path]:
    folder = lab._ranks.cluster.folder
    return [*folder.glob("push-*"), *folder.glob("pull-*")]


@pytest.mark.parametrize("memory_bytes", [transfer.MEMORY_BYTES, 0])
def test_what_is_large_goes_by_way_of_a_file_that_is_then_gone(
    lab: Lab, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MEMORY_BYTES", memory_bytes)
    large = torch.arange(2 * transfer.FILE_BYTES)
    lab.push(large=large)
    assert files_of(lab) == []
    for found in lab.pull("large", "all"):
        torch.testing.assert_close(found, torch.arange(2 * transfer.FILE_BYTES))
    assert files_of(lab) == []
    lab.run("large[:] = rank")
    assert [int(each[-1]) for each in lab.pull("large", "all")] == [0, 1]
    lab.run(OPENED)
    names: dict[str, Any] = {}
    exec(OPENED, names)
    for opened in [*lab.pull("opened", "all"), names["opened"]]:
        assert not [name for name in opened if "memfd:labkit" in name]


def test_what_may_not_be_opened_goes_in_parts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """As where a sandbox keeps a process out of another's memory."""
    forbidden = (
        "from labkit import serialization\n"
        "mapped = serialization.mapped\n"
        "def forbidden(path):\n"
        "    if f'/{os.getpid()}/' in str(path):\n"
        "        return mapped(path)\n"
        "    raise PermissionError(path)\n"
        "serialization.mapped = forbidden\n"
    )
    names: dict[str, Any] = {"os": os}
    monkeypatch.setattr(serialization, "mapped", serialization.mapped)
    monkeypatch.setattr(transfer, "PART_BYTES", 2**22)
    exec(forbidden, names)
    lab.run(f"import os\n{forbidden}")
    # A kernel that has died in its push has left this with the ranks.
    left = "labkit.rank.engine.transfer:push_part", b"left", True
    lab._ranks.cluster.call(*left, ranks=[0, 1])
    try:
        large = torch.arange(2**21)
        lab.push(large=large)
        assert "push: 100%" in capsys.readouterr().err
        for found in lab.pull("large", "all"):
            torch.testing.assert_close(found, large)
        assert "pull: 100%" in capsys.readouterr().err
    finally:
        lab.run("serialization.mapped = mapped")


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "FILE_BYTES", 2**10)


@pytest.fixture
def no_room(lab: Lab, small_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file be made for what is copied, and copy in small parts."""
    monkeypatch.setattr(transfer, "PART_BYTES", 2**10)
    monkeypatch.setattr(transfer, "MEMORY_BYTES", 0)
    monkeypatch.setattr(lab._ranks.cluster, "folder", Path("/nowhere"))


@pytest.mark.usefixtures("no_room")
def test_what_no_file_has_room_for_goes_in_parts_and_says_how_far_it_has_come(
    lab: Lab, capsys: Captured
) -> None:
    lab.push(small=torch.ones(2))
    lab.pull("small")
    assert capsys.readouterr().err == ""
    lab.push(large=torch.arange(2**10))
    assert "push: 100%" in capsys.readouterr().err
    for found in lab.pull("large", "all"):
        torch.testing.assert_close(found, torch.arange(2**10))
    assert "pull: 100%" in capsys.readouterr().err
    lab.run(
        "from labkit.rank.engine.transfer import _outgoing, _parts\n"
        "kept = len(_parts) + len(_outgoing)"
    )
    assert lab.pull("kept", "all") == [0, 0]


@pytest.mark.parametrize("fixture", ["small_files", "no_room"])
def test_a_pull_that_fails_on_one_rank_leaves_nothing_for_the_next_push(
    lab: Lab, fixture: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(fixture)
    lab.run("import threading\nlarge = {'pulled': torch.zeros(2**10)}")
    lab.run("large['lock'] = threading.Lock()", ranks="1")
    with pytest.raises(ValueError, match="cannot pickle"):
        lab.pull("large", "all")
    lab.push(pushed=torch.arange(2**10))
    lab.run("is_right = pushed.tolist() == [*range(2**10)] and 'pulled' not in dir()")
    assert lab.pull("is_right", "all") == [True, True]
    assert files_of(lab) == []


DIES = """
import os, signal

class Dies:
    def __reduce__(self):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return int, (5,)

large = [torch.zeros(2**10), Dies()]
"""


@pytest.mark.usefixtures("small_files")
def test_a_pull_from_a_rank_that_dies_leaves_no_file(lab: Lab) -> None:
    lab.run(DIES)
    with pytest.raises(UserError, match="rank 1 died"):
        lab.pull("large", "all")
    assert files_of(lab) == []
    assert lab.restart() == [1]


def test_an_interrupted_pull_leaves_no_file(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though the rank writes it after the interrupt."""
    monkeypatch.setattr(transfer, "MEMORY_BYTES", 0)
    began = tmp_path / "began"
    lab.run(
        "import time\nfrom pathlib import Path\n"
        "class Slow:\n"
        "    def __reduce__(self):\n"
        f"        Path({str(began)!r}).touch()\n"
        "        time.sleep(1)\n"
        "        return bytes, (2**18,)\n"
        "slow = [Slow(), bytes(2**18)]"
    )
    with pytest.raises(KeyboardInterrupt), interrupt_when(began.exists):
        lab.pull("slow")
    lab.run("pass")  # it begins when the rank has done what was asked before
    assert files_of(lab) == []
    assert lab.pull("slow")[1] == bytes(2**18)


def test_an_interrupted_push_leaves_no_file(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "MEMORY_BYTES", 0)
        patch.setattr("tqdm.tqdm.update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lab.push(large=torch.zeros(transfer.FILE_BYTES))
    assert files_of(lab) == []
    lab.push(large=torch.zeros(transfer.FILE_BYTES))


def test_a_copy_may_take_as_long_as_it_likes(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {}
    exec(SLOW, names)
    lab.run(SLOW)
    # A call with a limit would have to end within this.
    monkeypatch.setitem(Cluster.call.__kwdefaults__, "timeout_s", 1.0)
    lab.push(five=names["Slow"]())
    assert lab.pull("five", "all") == [5, 5]
    assert lab.pull("slow") == 5


def test_a_rank_that_answers_nothing_ends_a_copy_and_is_not_to_be_restarted(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.run("kept = rank")
    pid = int(lab.status()["pid"][1])
    monkeypatch.setattr(timeouts, "SILENCE_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=r"rank 1 has not answered for 1 s") as told:
            lab.push(never=5)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert f"kill -CONT {pid}" in str(told.value)
    assert "--all" not in str(told.value)
    assert lab.pull("kept", "all") == [0, 1]


SHARDED = """
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (world_size,))
sharded, other = (
    distribute_tensor(start + torch.arange(8.0), mesh, [Shard(0)]) for start in (0, 8)
)
"""


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        ("ValueError('not here')", pytest.raises(ValueError, match=r"^not here$")),
        (
            "RuntimeError('nor here')",
            pytest.raises(UserError, match="pull failed on rank 1: RuntimeError: nor"),
        ),
    ],
)
def test_a_gathering_that_fails_on_one_rank_frees_the_others(
    lab: Lab, raised: str, seen: Any
) -> None:
    lab.run(SHARDED)
    lab.run(f"def fail():\n    raise {raised}\nsharded.full_tensor = fail", ranks="1")
    start = time.monotonic()
    with seen:
        lab.pull("sharded", full=True)
    status = lab.status()
    assert list(status["state"]) == ["idle", "idle"]
    torch.testing.assert_close(lab.pull("other", full=True), torch.arange(8.0) + 8)
    # Rank 0 would have waited in its collective for the group's timeout, of 30 s.
    assert time.monotonic() - start < 20
    lab.run("dist.all_reduce(total := torch.ones(1))")
    assert lab.pull("total", "all") == [2, 2]


# ---- the watch, without ranks ----


class Clock:
    def __init__(self, watch: SilenceWatch) -> None:
        self._watch = watch
        self.now = 100.0

    def silent_after(self, seconds: float, step: float = 0.5) -> list[int]:
        found: list[int] = []
        for _ in range(round(seconds / step)):
            self.now += step
            found = self._watch.silent(self.now)
        return found


def asking(answers: dict[int, "Future[Any]"]) -> Callable[[int], "Future[Any]"]:
    def ask(rank: int) -> "Future[Any]":
        answers[rank] = Future()
        return answers[rank]

    return ask


def test_a_list_in_two_places_is_one_and_may_hold_itself(lab: Lab) -> None:
    lab.run("inner = [1]; twice = [inner, inner]; own = {}; own['own'] = own")
    first, second = lab.pull("twice")
    assert first is second
    own = lab.pull("own")
    assert own["own"] is own


def test_a_rank_is_silent_when_a_question_has_waited_long() -> None:
    answers: dict[int, Future[Any]] = {}
    clock = Clock(SilenceWatch([0, 1], asking(answers)))
    for _ in range(100):
        assert clock.silent_after(timeouts.ASK_S * 2) == []
        for answer in answers.values():
            answer.set_result({})
    assert clock.silent_after(timeouts.ASK_S) == []  # and both are asked again
    answers[1].set_result({})
    assert clock.silent_after(timeouts.SILENCE_S - 1) == []
    assert clock.silent_after(1) == [0]
    answers[0].set_result({})
    assert 0 not in clock.silent_after(timeouts.ASK_S)


def test_a_machine_that_slept_has_not_waited() -> None:
    answers: dict[int, Future[Any]] = {}
    clock = Clock(SilenceWatch([0], asking(answers)))
    clock.silent_after(1)
    assert clock.silent_after(3600.0, step=3600.0) == []


def test_who_cannot_be_asked_is_not_silent() -> None:
    def cancelled(rank: int) -> "Future[Any]":
        answer: Future[Any] = Future()
        answer.cancel()
        return answer

    clock = Clock(SilenceWatch([0], cancelled))
    assert clock.silent_after(timeouts.SILENCE_S * 2) == []
