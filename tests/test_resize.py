"""A lab that grows and shrinks: what stays, what is refused, how training goes on."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from interrupts import interrupt_when
from kernels import Kernel
from kernels import wait_until
from marks import in_suites
from marks import long_but

from labkit import Lab
from labkit import RankError
from labkit import timeouts
from labkit.checks import UserError
from labkit.host import watchdog

pytestmark = pytest.mark.timeout(240)

TRAIN = """
from torch.nn import functional
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 12),
    torch.nn.ReLU(), torch.nn.Linear(12, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
model, optimizer, loader = prepare(model, optimizer, dataset, batch_size=12)
for epoch in range(epochs):
    for x, y in loader:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""`epochs` passes of 4 steps each."""
WORLDS = [2, 4, 1, 3]
PLACE = """
import os
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
place = [int(os.environ[name]) for name in names]
sees = [rank, local_rank, world_size, dist.get_rank(), dist.get_world_size()]
total = torch.ones(1)
dist.all_reduce(total)
total = total.item()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with Lab(num_ranks=2, group_timeout_s=30) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Lab:
    """A lab of two ranks that works, whatever ran before."""
    if shared.world_size != 2:
        shared.restart(num_ranks=2)
    shared.restart()
    return shared


def losses(lab: Lab, strategy: str, epochs: int, **options: object) -> list[float]:
    """The mean loss of each step."""
    lab.push(epochs=epochs)
    run = lab.train(strategy, TRAIN, live=False, **options)  # type: ignore[arg-type]
    assert run.world_size == (1 if strategy == "single" else lab.world_size)
    mean: list[float] = run.history.groupby("step")["loss"].mean().tolist()
    return mean


class Engines:
    """The engines of a lab that are there, as the system has them."""

    def __init__(self, lab: Lab) -> None:
        first = psutil.Process(int(lab.status()["pid"][0]))
        self._token = first.environ()[watchdog.TOKEN_VARIABLE]
        self._server = first.ppid()

    def pids(self) -> set[int]:
        found = watchdog.find_processes(self._token)
        return {each.pid for each in found if watchdog.parent_of(each) == self._server}


@pytest.mark.parametrize(
    "strategy",
    in_suites(
        ["ddp", "zero1", "zero2", "zero3", "fsdp"],
        test=["fsdp"],
        long=["ddp", "zero1"],
    ),
)
def test_training_goes_on_as_in_one_process(
    lab: Lab, strategy: str, tmp_path: Path
) -> None:
    expected = losses(lab, "single", len(WORLDS))
    assert len(expected) == 16
    found: list[float] = []
    for number, world_size in enumerate(WORLDS):
        if number:
            lab.restart(num_ranks=world_size)
        found += losses(
            lab, strategy, number + 1, checkpoint=tmp_path, resume=bool(number)
        )
        assert lab.runs[-1].resumed_from == (4 * number or None)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_ranks_that_stay_keep_what_they_have(lab: Lab) -> None:
    lab.run("kept = [rank]\nwhose = id(kept)\nimport os\npid = os.getpid()")
    before = lab.pull("pid", "all"), lab.pull("whose", "all")
    started = [lab.restart(num_ranks=n) for n in (4, 3, 1, 2)]
    assert started == [[2, 3], [], [], [1]]
    lab.restart(num_ranks=4)
    lab.run(PLACE)
    assert lab.pull("place", "all") == [[r, r, 4, 4, 0] for r in range(4)]
    assert lab.pull("sees", "all") == [[r, r, 4, r, 4] for r in range(4)]
    assert lab.pull("total", "all") == [4.0] * 4
    lab.run("has = 'kept' in globals()")
    assert lab.pull("has", "all") == [True, False, False, False]
    assert lab.pull("pid", 0) == before[0][0]
    assert lab.pull("whose", 0) == before[1][0]
    assert [each.world_size for each in lab.placements] == [4] * 4
    assert lab.describe() == "4 ranks on the CPU, gloo"
    run = lab.train("raw", "log(x=1.0)", live=False)
    lab.restart(num_ranks=5)
    assert list(lab.status()["run"]) == [run.name] * 4 + [""]


def test_ranks_that_go_leave_nothing(lab: Lab) -> None:
    lab.restart(num_ranks=4)
    lab.run(
        "import subprocess\nchild = subprocess.Popen(['sleep', '600']).pid\n"
        "batches = iter(torch.utils.data.DataLoader(range(9), num_workers=1))\n"
        "next(batches)"
    )
    pids = list(map(int, lab.status()["pid"]))
    children = lab.pull("child", "all")
    lab.restart(num_ranks=1)
    assert Engines(lab).pids() == set(pids[:1])
    assert list(map(int, lab.status()["pid"])) == pids[:1]
    assert len(lab.stack().positions) == 1
    for pid in (*pids[1:], *children[1:]):
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), 10, f"{pid} is left")
    assert psutil.pid_exists(children[0])
    with pytest.raises(ValueError, match="rank"):
        lab.run("pass", ranks=1)


@pytest.mark.parametrize("num_ranks", long_but([1, 4], 1))
def test_what_was_made_for_another_number_of_ranks_is_refused(
    lab: Lab, num_ranks: int, tmp_path: Path
) -> None:
    lab.run(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "inner = torch.nn.Linear(4, 2)\nby_hand = DistributedDataParallel(inner)\n"
        "sharded = torch.nn.Linear(4, 2)\nfully_shard(sharded)\n"
        "sharded(torch.ones(1, 4)).sum().backward()\n"
        "group = dist.new_group([0, 1])\nones = torch.ones(1, 4)"
    )
    for strategy in ("ddp", "fsdp"):
        losses(lab, strategy, 1)
        names = [f"{strategy}_{name}" for name in ("model", "optimizer", "loader")]
        lab.run(f"{', '.join(names)} = model, optimizer, loader")
    lab.run(
        "val = ddp_loader.share(dataset, batch_size=4)\n"
        "begun = iter(val)\nnext(begun)\n"
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "zero = ZeroRedundancyOptimizer(inner.parameters(), torch.optim.SGD, lr=0.1)\n"
        "dealt = torch.utils.data.DistributedSampler(range(8))\n"
        "whole = torch.utils.data.DistributedSampler(range(8), 1, 0)"
    )
    lab.restart(num_ranks=num_ranks)
    here = range(min(num_ranks, 2))
    before = f"made for a lab of 2 ranks, and the lab now has {num_ranks}: "
    loop = "for x in torch.utils.data.DataLoader(range(8), sampler=dealt): pass"
    for code, thing, remedy in (
        ("by_hand(ones)", "DistributedDataParallel", "Wrap its module again"),
        ("sharded(ones)", "model and its optimizer", "Make both again"),
        ("fsdp_model(torch.ones(2, 8))", "model and its optimizer", "Make both again"),
        ("ddp_model(torch.ones(2, 8)).sum().backward()", "model and", "Make both"),
        ("ddp_optimizer.step()", "model and its optimizer", "Make both again"),
        ("next(iter(ddp_loader))", "loader", "the loader that prepare gives"),
        ("next(iter(val))", "loader.share", "Call share again"),
        ("next(begun)", "loader.share", "Call share again"),
        (loop, "DistributedSampler", "Make it again, and the DataLoader"),
        (
            "ddp_loader.share(dataset, batch_size=2)",
            "loader",
            "the loader that prepare",
        ),
        (
            f"save_checkpoint({str(tmp_path / 'x')!r}, model=sharded)",
            *("model and its optimizer", "Make both again"),
        ),
    ):
        with pytest.raises(RankError, match=f"this {thing} .*{before}.*{remedy}"):
            lab.run(code, ranks=list(here))
    for code in (
        "next(sharded.parameters()).full_tensor()",
        "dist.all_reduce(torch.ones(1), group=group)",
        "zero.step()",
    ):
        with pytest.raises(RankError, match=r"before %dist_restart: make it again"):
            lab.run(code, ranks=list(here))
    if num_ranks == 1:
        with pytest.raises(ValueError, match=before):
            lab.pull("sharded", full=True)
    lab.run("assert len([*whole]) == 8", ranks=list(here))
    # A replica is whole, and can be wrapped again.
    lab.run("found = ddp_model(torch.ones(2, 8)).sum().item()", ranks=list(here))
    if num_ranks == 1:
        lab.run("DistributedDataParallel(inner)(ones).sum().backward()")
        lab.train(
            "ddp",
            "new = torch.optim.SGD(ddp_model.parameters(), lr=0.1)\n"
            "m, o, batches = prepare(ddp_model, new, dataset, batch_size=12)\n"
            "for x, y in batches: (m(x) - y).square().mean().backward(); o.step()",
            live=False,
        )
    for strategy in ("ddp", "fsdp"):
        losses(lab, strategy, 1)


def test_what_cannot_be_changes_nothing(lab: Lab) -> None:
    lab.run("kept = rank")
    pids = list(lab.status()["pid"])
    for options, message in (
        ({"num_ranks": 0}, "0 ranks; choose 1 or more"),
        ({"num_ranks": -3}, "-3 ranks; choose 1 or more"),
        ({"num_ranks": 1.5}, "1.5 ranks; choose 1 or more"),
        ({"num_ranks": 10**9}, r"hold \d+ at most"),
        ({"num_ranks": 3, "everyone": True}, "--all restarts the ranks that there are"),
        ({"hosts": "node1:2"}, "this lab is on one host.*where -n N changes"),
        ({"hosts": "node1:x"}, "'x' ranks on node1; choose 1 or more"),
        ({"num_ranks": 2, "hosts": "node1:2"}, "-n 2 and --hosts node1:2.* leave -n"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.restart(**options)
    assert list(lab.status()["pid"]) == pids
    assert lab.world_size == 2
    assert lab.restart(num_ranks=2) == []
    lab.run("dist.barrier()")
    assert lab.pull("kept", "all") == [0, 1]


def test_while_a_run_or_a_study_goes_on_it_is_refused(lab: Lab) -> None:
    run = lab.train("raw", "while True: dist.barrier()", live=False, background=True)
    try:
        with pytest.raises(UserError, match=f"{run.name} is running in the background"):
            lab.restart(num_ranks=3)
    finally:
        run.interrupt()
    with (
        lab._divided(1),
        pytest.raises(UserError, match="the lab is running another cell"),
    ):
        lab.restart(num_ranks=3)
    assert lab.world_size == 2
    lab.run("dist.barrier()")


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 3), (1, 1), (1, 3)])
def test_a_rank_that_died_is_back_where_it_is_to_be(
    lab: Lab, rank: int, num_ranks: int
) -> None:
    lab.run("kept = rank")
    with pytest.raises(RankError, match="killed by SIGKILL"):
        lab.run(
            "import os, signal\n"
            f"if rank == {rank}: os.kill(os.getpid(), signal.SIGKILL)\n"
            "else: dist.barrier()"
        )
    started = lab.restart(num_ranks=num_ranks)
    assert started == [r for r in range(num_ranks) if r == rank or r > 1]
    lab.run("has = 'kept' in globals()\ndist.barrier()")
    for each in range(num_ranks):
        assert lab.pull("has", each) == (each not in started)
    losses(lab, "ddp", 1)


def test_an_interrupt_leaves_a_lab_that_works(lab: Lab) -> None:
    lab.run("kept = rank")
    engines = Engines(lab)
    before = engines.pids()
    with (
        pytest.raises(KeyboardInterrupt),
        interrupt_when(lambda: len(engines.pids()) > 2),
    ):
        lab.restart(num_ranks=4)
    assert lab.world_size == 2
    wait_until(lambda: engines.pids() == before, 10, "a rank is left")
    lab.run("dist.barrier()")
    assert lab.pull("kept", "all") == [0, 1]
    assert lab.restart(num_ranks=3) == [2]
    lab.run("dist.barrier()")


@pytest.mark.long
def test_a_start_that_fails_changes_nothing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.run("import os\nkept = rank\nserver = os.getppid()")
    os.kill(lab.pull("server", 0), signal.SIGSTOP)
    monkeypatch.setattr(timeouts, "FORK_S", 1)
    with pytest.raises(UserError, match=r"nothing has changed: .*not answered for 1 s"):
        lab.restart(num_ranks=4)
    assert lab.world_size == 2
    lab.run("dist.barrier()")
    assert lab.pull("kept", "all") == [0, 1]
    assert lab.restart(num_ranks=3) == [2]  # another server
    lab.run("dist.barrier()")


@pytest.mark.long
def test_the_magic_says_what_it_has_done(kernel: Kernel) -> None:
    kernel.run("%%dist\nkept = rank")
    said = kernel.run("%dist_restart -n 3").stdout
    assert re.match(r"rank 2 started; Ready: 3 ranks on the CPU, gloo; every", said)
    assert "%dist_restart -n 2" in kernel.run("%dist_start -n 2").stderr
    assert kernel.run("%dist_start -n 3").status == "ok"
    assert "<th>2</th>" in kernel.run("%dist_status").result["text/html"]
    said = kernel.run("%dist_restart -n 2").stdout
    assert said.startswith("rank 2 ended; Ready: 2 ranks")
    kernel.run("%dist_pull kept --all")
    assert kernel.run("print(kept)").stdout == "[0, 1]\n"
    for line in ("-n 0", "-n two", "-n 2 --all", "--hosts a:1", "-n 2 --hosts a:1"):
        reply = kernel.run(f"%dist_restart {line}")
        assert reply.status == "error"
        assert "UsageError" in reply.stderr
        assert "Traceback" not in reply.stderr
    assert kernel.run("%%dist\ndist.barrier()").status == "ok"
