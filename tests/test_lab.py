"""Cells, variables and state on a real engines, without magics."""

import contextlib
import errno
import io
import os
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipyparallel
import numpy as np
import psutil
import pytest
import torch
from kernels import wait_until
from marks import in_suites
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit import timeouts
from labkit.compat import ipyparallel as ipp_compat
from labkit.host import watchdog
from labkit.notebook.cluster import engines
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.kernel.output import OutputMerger
from labkit.rank.terminal.console import BURST
from labkit.rank.terminal.console import MAX_FLUSHES
from labkit.rank.terminal.console import WRITE_COST
from labkit.rank.terminal.console import Pace
from labkit.rank.terminal.console import flush_what_was_written
from labkit.rank.terminal.console import keep_unsent
from labkit.rank_spec import parse_ranks
from labkit.unsent import Tail
from labkit.unsent import shared_pages
from labkit.unsent import unsent_output

Captured = pytest.CaptureFixture[str]


def run(lab: Lab, code: str, ranks: Any = None) -> None:
    lab.run(textwrap.dedent(code), ranks)


def test_every_rank_has_the_promised_names(lab: Lab, capsys: Captured) -> None:
    run(
        lab,
        "print(rank, local_rank, world_size, device, torch.__name__, dist.__name__)",
    )
    assert capsys.readouterr().out == (
        "[rank 0] 0 0 2 cpu torch torch.distributed\n"
        "[rank 1] 1 1 2 cpu torch torch.distributed\n"
    )


def test_facts_are_true_again_in_the_next_cell(lab: Lab, capsys: Captured) -> None:
    run(lab, "for rank in range(100): pass\nworld_size = 'large'")
    run(lab, "print(rank, world_size)")
    assert capsys.readouterr().out == "[rank 0] 0 2\n[rank 1] 1 2\n"


def test_a_users_own_log_is_not_overwritten(lab: Lab, capsys: Captured) -> None:
    run(lab, "from math import log")
    run(lab, "print(log(1.0))\ndel log")
    assert capsys.readouterr().out == "[ranks 0-1] 0.0\n"
    run(lab, "print(log.__doc__.splitlines()[0])")
    assert "Record scalars of this rank" in capsys.readouterr().out


def test_ranks_are_one_group(lab: Lab, capsys: Captured) -> None:
    run(lab, "x = torch.tensor([rank + 1.0])\ndist.all_reduce(x)\nx")
    assert capsys.readouterr().out == "[ranks 0-1] tensor([3.])\n"


def test_variables_stay_between_cells(lab: Lab, capsys: Captured) -> None:
    run(lab, "kept = rank * 10")
    run(lab, "print(kept)")
    assert capsys.readouterr().out == "[rank 0] 0\n[rank 1] 10\n"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [("0", [0]), ("1", [1]), ("0,1", [0, 1]), ("0-1", [0, 1]), ([1], [1]), (1, [1])],
)
def test_a_cell_runs_on_the_named_ranks(
    lab: Lab, capsys: Captured, ranks: Any, expected: list[int]
) -> None:
    run(lab, "print('here', rank)", ranks)
    assert capsys.readouterr().out == "".join(
        f"[rank {r}] here {r}\n" for r in expected
    )


@pytest.mark.parametrize("ranks", ["2", "0,7", "x", "1-0", "", "-1", [], 5, [0, 9]])
def test_ranks_that_do_not_exist_are_named(ranks: Any) -> None:
    with pytest.raises(ValueError, match=r"ranks.*(0, 1|write 0, or 0,2)"):
        parse_ranks(ranks, 2)


def test_ipython_syntax_works_in_a_cell(lab: Lab, capsys: Captured) -> None:
    run(
        lab,
        """
        import asyncio
        !echo from the shell
        number = %sx echo 3
        await asyncio.sleep(0.01)
        print(number)
        """,
    )
    out = capsys.readouterr().out
    assert "[ranks 0-1] from the shell\n" in out
    assert "['3']" in out


def test_a_cell_that_awaits_can_be_followed_by_another(
    lab: Lab, capsys: Captured
) -> None:
    run(lab, "import asyncio\nasync def late():\n    return 7\nawait late()")
    run(lab, "print('next')")
    assert capsys.readouterr().out == "[ranks 0-1] 7\n[ranks 0-1] next\n"


def test_streams_of_ranks_go_to_the_same_stream_here(
    lab: Lab, capsys: Captured
) -> None:
    run(lab, "import sys\nprint('good')\nprint('bad', file=sys.stderr)")
    captured = capsys.readouterr()
    assert captured.out == "[ranks 0-1] good\n"
    assert captured.err == "[ranks 0-1] bad\n"


def test_200_kb_on_stderr_arrive_whole(lab: Lab, capsys: Captured) -> None:
    run(
        lab,
        """
        import sys
        for line in range(2500):
            print(f"{line:05d}" + "x" * 75, file=sys.stderr)
        """,
    )
    lines = capsys.readouterr().err.splitlines()
    assert [int(line[12:17]) for line in lines] == list(range(2500))


def test_output_appears_while_the_cell_runs(lab: Lab, tmp_path: Any) -> None:
    # The ranks wait for a file that is written here when their output is seen.
    signal_file = tmp_path / "seen"

    class Screen:
        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text
            if "early" in self.text:
                signal_file.touch()

        def flush(self) -> None:
            pass

    screen = Screen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", screen)
        lab.push(signal_file=str(signal_file))
        code = """
            import time
            from pathlib import Path
            print("early")
            while not Path(signal_file).exists():
                time.sleep(0.01)
            print("late")
            """
        lab.run(textwrap.dedent(code), timeout=20)
    assert screen.text == "[ranks 0-1] early\n            late\n"


def test_the_client_keeps_nothing_of_cells_that_have_ended(lab: Lab) -> None:
    client = lab._ranks.cluster.client
    for code in "1", "print('output')", "1 / 0", "rank / rank":
        with contextlib.suppress(RankError):
            lab.run(code)
    wait_until(
        lambda: not client._output_futures and not client.outstanding,
        10,
        "the client waits for more of a cell",
    )


def test_functions_of_a_training_cell_say_where_they_belong(lab: Lab) -> None:
    with pytest.raises(RankError, match="begin the cell with %%dist_train STRATEGY"):
        run(lab, "log(loss=1.0)")


# ---- variables ----


def test_push_and_pull_bring_back_the_same(lab: Lab) -> None:
    values = {"numbers": [1, 2.5], "array": np.arange(6).reshape(2, 3), "text": "ä"}
    lab.push(**values)
    assert lab.pull("numbers") == [1, 2.5]
    np.testing.assert_array_equal(lab.pull("array", 1), values["array"])
    assert lab.pull("text", "all") == ["ä", "ä"]


def test_push_reaches_only_the_named_ranks(lab: Lab) -> None:
    lab.push(where="everywhere")
    lab.push("1", where="on 1")
    assert lab.pull("where", "all") == ["everywhere", "on 1"]


def test_pulled_tensors_and_models_are_plain(lab: Lab) -> None:
    run(
        lab,
        """
        wrapped = nn = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        tensor = torch.full((2,), float(rank))
        """,
    )
    model = lab.pull("wrapped")
    assert type(model) is nn.Linear
    torch.testing.assert_close(lab.pull("tensor", 1), torch.ones(2))


def test_a_sharded_tensor_that_is_not_gathered_is_the_part_of_its_rank(
    lab: Lab, capsys: Captured
) -> None:
    run(
        lab,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (world_size,))
        parts = {"x": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}
        whole = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
        split = torch.nn.Linear(1, 4, bias=False)
        split.weight = torch.nn.Parameter(
            distribute_tensor(split.weight, mesh, [Shard(0)])
        )
        """,
    )
    for rank, values in enumerate([[0.0, 1.0], [2.0, 3.0]]):
        found = lab.pull("parts", rank)["x"]
        assert type(found) is torch.Tensor
        assert found.tolist() == values
        said = f"parts is sharded, and what was copied is the part of rank {rank} alone"
        assert said in capsys.readouterr().err
    assert lab.pull("whole").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert capsys.readouterr().err == ""
    with pytest.raises(
        ValueError, match=r"parameters are sharded over ranks; .*--full"
    ):
        lab.pull("split")


def test_full_gathers_a_sharded_tensor_and_a_state_dict(lab: Lab) -> None:
    run(
        lab,
        """
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (world_size,))
        sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        """,
    )
    torch.testing.assert_close(lab.pull("sharded", full=True), torch.arange(8.0))
    plain = nn.Linear(3, 2)
    plain.load_state_dict(lab.pull("model", full=True))
    torch.manual_seed(0)
    torch.testing.assert_close(plain.weight, nn.Linear(3, 2).weight)


def test_after_a_gathering_that_failed_the_group_is_re_created(lab: Lab) -> None:
    run(
        lab,
        """
        import threading
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (world_size,))
        parts = {"sharded": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
        if rank == 1:
            parts["lock"] = threading.Lock()  # cannot be pickled
        from labkit.rank.engine.rpc import runner
        formed = runner().group.formed_at_ns
        """,
    )
    with pytest.raises(ValueError, match=r"cannot pickle '_thread.lock'"):
        lab.pull("parts", "all", full=True)
    run(lab, "is_another = runner().group.formed_at_ns > formed")
    assert lab.pull("is_another", "all") == [True, True]


def test_pull_of_nothing_names_the_rank(lab: Lab) -> None:
    run(lab, "only_here = 1", "0")
    with pytest.raises(NameError, match="rank 1: no variable 'only_here'"):
        lab.pull("only_here", "all")


# ---- the lab itself ----


def test_status_tells_of_every_rank(lab: Lab) -> None:
    table = lab.status()
    assert list(table.index) == [0, 1]
    assert list(table["state"]) == ["idle", "idle"]
    assert all(psutil.pid_exists(pid) for pid in table["pid"])
    assert (table["memory_used"] > 50 * 2**20).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "choose 1 or more"),
        ({"num_ranks": -3}, "choose 1 or more"),
        ({"backend": "mpi"}, "choose one of: auto, nccl, gloo"),
        ({"device": "tpu"}, "choose one of: auto, cuda, cpu"),
        ({"num_ranks": 2, "device": "cpu", "backend": "nccl"}, "use --backend gloo"),
        ({"threads": 0}, "must be a whole number, 1 or more"),
        ({"group_timeout_s": 0}, "must be a positive number of seconds"),
    ],
)
def test_a_lab_that_cannot_be_starts_nothing(
    arguments: dict[str, Any], message: str
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(ValueError, match=message):
        Lab(**arguments)
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after == before


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(lab: Lab, timeout: float) -> None:
    with pytest.raises(
        ValueError, match="it must be a number of seconds greater than 0"
    ):
        lab.run("1", timeout=timeout)


def test_status_tells_of_a_rank_that_cannot_say_more(lab: Lab) -> None:
    lab.run(
        "import os, psutil\nfiles, memory = [], psutil.virtual_memory\n"
        "def full(): raise OSError(24, os.strerror(24))\n"
        "if rank == 1: psutil.virtual_memory = full"
    )
    status = lab.status()
    lab.run("psutil.virtual_memory = memory")
    assert list(status["state"]) == ["idle", "does not answer"]
    assert "rank 1 cannot answer 'describe': OSError: " in status["cause"][1]


@pytest.mark.long
def test_two_labs_do_not_disturb_each_other(lab: Lab, capsys: Captured) -> None:
    lab.run("mine = 'first'")
    with Lab(num_ranks=1) as other:
        other.run("mine = 'second'")
        assert other.pull("mine") == "second"
        lab.run("dist.barrier()")
    assert lab.pull("mine", "all") == ["first", "first"]
    lab.run("dist.barrier()")


def test_a_lab_listens_on_the_loopback_address_only(lab: Lab) -> None:
    assert lab._ranks is not None
    lab.run("torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1));")
    addresses = {
        connection.laddr.ip
        for process in watchdog.find_processes(lab._ranks.cluster.host.token)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


@pytest.mark.long
def test_a_stopped_lab_says_so_and_leaves_nothing() -> None:
    lab = Lab(num_ranks=1)
    assert lab._ranks is not None
    token, folder = lab._ranks.cluster.host.token, lab._ranks.cluster.folder
    assert watchdog.find_processes(token)
    lab.stop()
    lab.stop()
    assert watchdog.find_processes(token) == []
    assert not os.path.exists(folder)  # noqa: PTH110
    with pytest.raises(RuntimeError, match="the lab is stopped"):
        lab.run("1")


@pytest.mark.long
def test_engines_that_registered_while_the_client_connected_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It hears of none that comes between the list that it got and its subscription.
    missed: list[Any] = []
    monkeypatch.setattr(
        ipyparallel.Client, "_register_engine", lambda self, msg: missed.append(msg)
    )
    with Lab(num_ranks=2) as lab:
        assert len(missed) > 0
        lab.run("dist.barrier()")


def test_a_cell_that_shows_nothing_is_answered_by_one_message(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What else IPython and labkit could say would take half of a trivial cell's
    time."""
    published: list[str] = []
    send = ipp_compat.send_cell

    def send_and_listen(
        client: Any, ident: bytes, code: str, spec: Any, on_output: Any, on_reply: Any
    ) -> Any:
        def hear(message: Any) -> None:
            published.append(message["header"]["msg_type"])
            on_output(message)

        return send(client, ident, code, spec, hear, on_reply)

    monkeypatch.setattr(ipp_compat, "send_cell", send_and_listen)
    lab.run("x = 1")
    assert published == []
    # Else it comes behind what was shown.
    lab.run("if rank == 1: print('shown')")
    assert published == ["stream", "data_message"]
    assert capsys.readouterr().out == "[rank 1] shown\n"


def test_what_a_hook_of_the_users_prints_after_a_cell_is_shown(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run(
        "events = get_ipython().events\n"
        "ended = lambda result: print('the cell took long')\n"
        "events.register('post_run_cell', ended)"
    )
    capsys.readouterr()
    try:
        lab.run("print('the cell')")
        shown = capsys.readouterr().out
        assert shown == "[ranks 0-1] the cell\n            the cell took long\n"
    finally:
        lab.run("events.unregister('post_run_cell', ended)")


def test_an_error_in_a_hook_of_the_users_is_shown_and_fails_no_cell(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = "pre_execute", "pre_run_cell", "post_execute", "post_run_cell"
    lab.run(
        "events = get_ipython().events\n"
        "def fails(*info): raise ValueError('on purpose')\n"
        f"for each in {hooks}: events.register(each, fails)"
    )
    capsys.readouterr()
    try:
        lab.run("print('the cell')")
        shown = capsys.readouterr()
        assert shown.out == "[ranks 0-1] the cell\n"
        assert shown.err.count("ValueError: on purpose") == len(hooks)
        with pytest.raises(RankError, match="ZeroDivisionError"):
            lab.run("1 / 0")
    finally:
        lab.run(f"for each in {hooks}: events.unregister(each, fails)")


def test_an_error_in_what_a_hook_runs_fails_no_cell(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run(
        "events = get_ipython().events\n"
        "def runs(result):\n"
        "    events.unregister('post_run_cell', runs)\n"
        "    get_ipython().run_cell('1 / 0', silent=True)"
    )
    lab.run("events.register('post_run_cell', runs)")
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_cell_within_a_cell_does_not_end_it(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    for inner in ("", "x = 1"):
        for silent in (True, False):
            with pytest.raises(RankError, match="failed at line 3: 1 / 0"):
                lab.run(
                    f"get_ipython().run_cell({inner!r}, silent={silent})\n"
                    "print('goes on')\n"
                    "1 / 0"
                )
            assert capsys.readouterr().out == "[ranks 0-1] goes on\n"


def test_hearts_beat_seldom_where_nobody_registers(lab: Lab) -> None:
    lab.run(
        "from ipyparallel.engine.app import IPEngine\n"
        "beats = []\n"
        "heard = lambda parts: beats.append(float(parts[-1]))\n"
        "IPEngine.instance()._hb_listener.on_recv(heard)"
    )
    wait_until(lambda: len(lab.pull("beats", 0)) > 5, 60, "six beats")
    # On average: one that is late comes soon before the next.
    assert np.diff(lab.pull("beats", 0)).mean() > timeouts.BEAT_S / 2


def test_a_flush_waits_only_where_something_was_written() -> None:
    flushes: list[str] = []
    stream = io.StringIO()
    holder = SimpleNamespace(
        write=stream.write, flush=lambda: flushes.append(stream.getvalue())
    )
    flush_what_was_written(holder)
    for _ in range(3):
        holder.flush()
    assert flushes == [""]  # what was there before
    holder.write("a")
    holder.flush()
    holder.flush()
    assert flushes == ["", "a"]


def test_a_fast_loop_that_flushes_sends_few_messages() -> None:
    """As `logging` does, at each line; the notebook takes some hundreds a second."""
    flushes: list[str] = []
    stream = io.StringIO()
    holder = SimpleNamespace(
        write=stream.write, flush=lambda: flushes.append(stream.getvalue())
    )
    send = flush_what_was_written(holder)
    for _ in range(1000):
        holder.write("a")
        holder.flush()
    assert len(flushes) <= 2 * MAX_FLUSHES
    send()
    assert flushes[-1] == 1000 * "a"


def test_a_rank_that_prints_more_than_is_shown_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0, slept=[])

    def sleep(seconds: float) -> None:
        clock.slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(
        "labkit.rank.terminal.console.time",
        SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep),
    )
    stream = io.StringIO()
    holder = SimpleNamespace(write=stream.write)
    Pace(1000.0).slow(holder)
    holder.write(BURST // 2 * "a" + "\n")
    assert not clock.slept
    for _ in range(BURST):
        holder.write("a\n")
        if clock.now > 60:
            break
    shown = 1000.0 * clock.now
    num_written = (len(stream.getvalue()) - BURST // 2) // 2
    cost = 2 + 2 * WRITE_COST  # of a line
    assert num_written * cost == pytest.approx(shown + BURST / 2, rel=0.01)
    holder.write(50 * BURST * "a")
    assert clock.slept[-1] == timeouts.PRINT_S


@pytest.mark.long
@pytest.mark.timeout(90)
def test_an_endless_loop_that_prints_is_stopped(lab: Lab, capsys: Captured) -> None:
    """It was killed, with its variables, while what it had printed was shown."""
    lines = "Traceback (most recent call last):\\n  File x\\nValueError: no\\n"
    with pytest.raises(CellTimeoutError) as caught:
        lab.run(f"kept = 5\nwhile True: print('{lines}')", timeout=5)
    assert "rank 0: stopped at line 2" in str(caught.value)
    capsys.readouterr()
    lab.run("print(kept)")
    assert capsys.readouterr().out == "[ranks 0-1] 5\n"


def test_both_streams_are_sent_in_the_order_of_what_is_written(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_message = OutputMerger.add_message
    came: dict[int, list[str]] = {0: [], 1: []}

    def note(
        merger: OutputMerger, rank: int, kind: str, content: dict[str, Any]
    ) -> None:
        if kind == "stream":
            came[rank].append(content["text"])
        add_message(merger, rank, kind, content)

    monkeypatch.setattr(OutputMerger, "add_message", note)
    run(
        lab,
        """
        import sys
        for i in range(20):
            print(f"err {i}", file=sys.stderr)
            print(f"out {i}")
        """,
    )
    text = "".join(f"err {i}\nout {i}\n" for i in range(20))
    assert ["".join(texts) for texts in came.values()] == [text, text]


@pytest.mark.long
def test_what_forks_print_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    # Under pytest ipykernel leaves a process's file descriptors alone.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        captured = capsys.readouterr()
        shown += captured.out + captured.err
        return all(f"{i} {name}" in shown for i in range(4) for name in ("out", "err"))

    with Lab(num_ranks=1) as lab:
        run(
            lab,
            """
            import sys
            from torch.utils.data import DataLoader, Dataset

            class Printing(Dataset):
                def __len__(self):
                    return 4

                def __getitem__(self, i):
                    print(i, "out")
                    print(i, "err", file=sys.stderr)
                    return i

            for batch in DataLoader(Printing(), batch_size=2, num_workers=2):
                pass
            """,
        )
        wait_until(is_shown, 20, "what workers print")
    assert shown.count("out") == shown.count("err") == 4


def test_a_fork_sends_nothing_in_the_place_of_a_rank(tmp_path: Path) -> None:
    """One that has kept `write`, as a bar does: what the rank has not sent stays so."""

    def take() -> Iterator[tuple[dict[str, Any], str]]:
        yield {}, "text"

    stream = SimpleNamespace(write=len, _flush_buffers=take)
    keep_unsent(stream, Tail(shared_pages(tmp_path / "unsent"), "stdout"))
    stream.write("goodbye")
    if (pid := os.fork()) == 0:
        os._exit([*stream._flush_buffers()] != [({}, "text")])
    assert os.waitpid(pid, 0)[1] == 0
    assert unsent_output(tmp_path / "unsent") == {"stdout": "goodbye"}


def test_a_flush_during_a_write_does_not_take_the_place_of_the_next() -> None:
    texts: list[str] = []
    flushes: list[list[str]] = []

    def write(text: str) -> None:
        holder.flush()  # as another thread, which comes too early
        texts.append(text)

    holder = SimpleNamespace(write=write, flush=lambda: flushes.append([*texts]))
    flush_what_was_written(holder)
    holder.write("a")
    holder.flush()
    assert flushes[-1] == ["a"]


def test_a_flush_that_was_interrupted_is_made_up_for() -> None:
    outcomes = [KeyboardInterrupt, None]

    def flush() -> None:
        if error := outcomes.pop(0):
            raise error

    holder = SimpleNamespace(write=lambda text: None, flush=flush)
    flush_what_was_written(holder)
    with pytest.raises(KeyboardInterrupt):
        holder.flush()
    holder.flush()
    assert outcomes == []


@pytest.mark.long
@pytest.mark.parametrize("number", in_suites([0, 2, 5, 10], test=[2]))
def test_a_port_that_another_process_takes_does_not_fail_the_start(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    # Of those that ipyparallel finds free, and listens on a moment later: the first is
    # the hub's, the others those of parts without which it would go on for ever.
    sockets = [socket.socket() for _ in range(16)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in [*sockets[:number], *sockets[number + 1 :]]:
        each.close()
    sockets[number].listen()
    chosen = f"--ports={','.join(map(str, ports))}"
    arguments = [*engines._CONTROLLER_ARGS, chosen]
    stop = engines.Cluster.stop

    def free_and_stop(self: engines.Cluster) -> None:
        sockets[number].close()
        stop(self)

    monkeypatch.setattr(engines, "_CONTROLLER_ARGS", arguments)
    monkeypatch.setattr(engines.Cluster, "stop", free_and_stop)
    with Lab(num_ranks=1) as lab:
        lab.run("x = 1")
        assert lab.pull("x") == 1


def test_too_few_free_ports_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [*range(3)]

    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            if not left:
                raise OSError(errno.EADDRINUSE, "Address already in use")
            left.pop()

    monkeypatch.setattr(engines.socket, "socket", Socket)
    with pytest.raises(
        RuntimeError, match=r"has 3 free TCP ports, and a lab may need 100"
    ):
        Lab(num_ranks=1)


def test_a_controller_that_does_not_come_up_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def late(self: Any) -> None:
        raise TimeoutError("no connection files in 60 s")

    monkeypatch.setattr("ipyparallel.Cluster.connect_client", late)
    said = "controller did not start: no connection files in 60 s; it printed:"
    with pytest.raises(RuntimeError, match=said):
        Lab(num_ranks=1)


def test_nothing_of_the_notebooks_wing_is_on_a_rank(lab: Lab) -> None:
    lab.train("ddp", "log(loss=1.0)", live=False)
    lab.push(value=1)
    lab.run("import sys; loaded = [*sys.modules]")
    for loaded in lab.pull("loaded", None):
        assert "labkit.rank.engine.rpc" in loaded
        assert [name for name in loaded if name.startswith("labkit.notebook")] == []
