"""What only a GPU can show of failures: NCCL, contexts and errors of CUDA."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kernels import wait_until

from labkit import Lab
from labkit import RankError
from labkit.notebook.execution.errors import CellTimeoutError

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(150)]

REDUCE = "dist.all_reduce(torch.ones(1, device=device))\ntorch.cuda.synchronize()"
ONE_OF_TWO = {
    "all_reduce": "dist.all_reduce(torch.ones(4, device=device))",
    "broadcast": "dist.broadcast(torch.ones(4, device=device), src=1)",
    "all_gather": """dist.all_gather_into_tensor(
        torch.empty(8, device=device), torch.ones(4, device=device)
    )""",
    "recv": """for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, torch.empty(4, device=device), 1)]
    ):
        work.wait()""",
}
"""What rank 0 calls, and rank 1 does not."""
HANG = """
import time
if rank == 0:
    {call}
    torch.cuda.synchronize()
else:
    time.sleep(3600)
"""
HANGS_S = 8


@contextmanager
def hanging(lab: Lab, call: str) -> Iterator[list[BaseException]]:
    """While the block runs, a cell in which rank 0 waits for rank 1."""
    ended: list[BaseException] = []

    def run() -> None:
        try:
            lab.run(HANG.format(call=call), timeout=HANGS_S, hang_after=0)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        thread.join(60)
    assert not thread.is_alive(), "the cell is not over"


@pytest.mark.parametrize("name", ONE_OF_TWO)
def test_stacks_name_the_collective_that_the_gpu_waits_in(nccl: Lab, name: str) -> None:
    nccl.run("kept = rank + 1")
    texts = [""]

    def is_named() -> bool:
        texts.append(str(nccl.stack()))
        [first, *_] = texts[-1].splitlines()
        wanted = "(_coalescing_manager|recv)" if name == "recv" else name
        return re.search(rf"rank 0: .*{wanted}", first) is not None

    with hanging(nccl, ONE_OF_TWO[name]) as ended:
        try:
            wait_until(is_named, HANGS_S - 1, f"{name} is not named")
        finally:
            print(texts[-1])
    assert isinstance(ended[0], CellTimeoutError)
    # NCCL cannot be used any more where a batch of messages was cut short.
    lost = "rank == 0 or" if name == "recv" else ""
    nccl.run(f"assert {lost} kept == rank + 1\n{REDUCE}")


def test_ten_groups_leave_no_memory(nccl: Lab) -> None:
    """Outside of torch's allocator, where NCCL has its buffers."""
    free = []
    for _ in range(10):
        with pytest.raises(RankError, match="on purpose"):
            nccl.run(f"if rank == 1:\n    raise ValueError('on purpose')\n{REDUCE}")
        nccl.run("free = torch.cuda.mem_get_info(device)[0]")
        free.append(min(nccl.pull("free", "all")))
    print("MiB that are free:", [each >> 20 for each in free])
    assert free[1] - free[-1] < 64 * 2**20


def test_a_failure_under_one_strategy_spoils_no_other(nccl: Lab) -> None:
    """Their communicators are re-created, and split from a re-created group's."""
    prepared = """
import torch
from torch.utils.data import TensorDataset
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(16, 8))
model, optimizer, loader = prepare(model, optimizer, data, batch_size=4)
for step, (x,) in enumerate(loader):
    if fails and step == 2 and rank == 1:
        raise ValueError("on purpose")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    for strategy in ("hsdp", "zero1", "fsdp", "hsdp"):
        nccl.push(fails=True)
        with pytest.raises(RankError, match="on purpose"):
            nccl.train(strategy, prepared, live=False)
        nccl.push(fails=False)
        assert nccl.train(strategy, prepared, live=False).state == "finished"


def test_a_first_message_that_never_comes(nccl: Lab) -> None:
    """NCCL connects two ranks when the first one is sent, and the CPU waits for it."""
    with pytest.raises(RankError, match="on purpose"):  # so that the group is new
        nccl.run(f"kept = rank + 1\nif rank: raise ValueError('on purpose')\n{REDUCE}")
    with hanging(nccl, "dist.irecv(torch.empty(4, device=device), 1).wait()") as ended:
        pass
    assert isinstance(ended[0], CellTimeoutError)
    nccl.run(f"assert kept == rank + 1\n{REDUCE}")


STAGES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def fail(where):
    if rank == failing and where == place:
        raise ValueError("on purpose")

model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(32, 8))
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
for step, (x,) in enumerate(loader):
    fail(f"forward {step}")
    loss = model(x).square().mean()
    fail(f"backward {step}")
    loss.backward()
    fail(f"step {step}")
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("place", ["forward 0", "backward 0", "step 0", "backward 3"])
def test_a_failure_between_stages_costs_no_variables(
    nccl: Lab, place: str, failing: int
) -> None:
    nccl.run("kept = rank + 1")
    nccl.push(place=place, failing=failing)
    with pytest.raises(RankError, match="on purpose"):
        nccl.train("pipeline", STAGES, live=False, hang_after=0)
    nccl.run(f"assert kept == rank + 1\n{REDUCE}")


def test_an_error_of_a_kernel_costs_that_rank_alone(nccl: Lab) -> None:
    nccl.run("kept = rank + 1")
    code = "torch.zeros(4, device=device)[torch.tensor([9], device=device)]"
    with pytest.raises(RankError, match="rank 0") as caught:
        nccl.run(f"if rank == 0:\n    {code}\n{REDUCE}")
    print(caught.value)
    nccl.restart()
    nccl.run(f"assert rank == 0 or kept == rank + 1\n{REDUCE}")


def test_out_of_memory_says_what_holds_it(nccl: Lab) -> None:
    with pytest.raises(RankError, match="Memory of rank 0") as caught:
        nccl.run(
            "if rank == 0:\n"
            "    held = []\n"
            "    while True:\n"
            "        held.append(\n"
            "            torch.empty(2**32, dtype=torch.uint8, device=device)\n"
            "        )\n"
            f"{REDUCE}"
        )
    print(caught.value)
    assert "held" in str(caught.value)
    nccl.run(f"if rank == 0:\n    del held\n    torch.cuda.empty_cache()\n{REDUCE}")


def test_what_a_failed_cell_held_is_free(nccl: Lab) -> None:
    nccl.run("before = torch.cuda.memory_allocated()")
    with pytest.raises(RankError, match="on purpose"):
        nccl.run(
            "def work():\n"
            "    large = torch.empty(2**30, dtype=torch.uint8, device=device)\n"
            "    if rank == 1:\n"
            "        raise ValueError('on purpose')\n"
            "    dist.all_reduce(large)\n"
            "    torch.cuda.synchronize()\n"
            "work()"
        )
    nccl.run("left = torch.cuda.memory_allocated() - before")
    assert max(nccl.pull("left", "all")) < 2**29
