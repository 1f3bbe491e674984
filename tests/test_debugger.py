"""Typing for ranks: `input`, breakpoints, and the debugger where a cell fails."""

import re
from collections.abc import Iterator

import pytest

from tests.kernels import Kernel
from tests.kernels import Reply
from tests.kernels import running_kernel

pytestmark = pytest.mark.timeout(180)

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
BREAKS = """
%%dist
def double(x):
    y = x * 2
    breakpoint()
    dist.all_reduce(y)
    return y
total = double(torch.ones(1) * (rank + 1))
print(total.item())
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        started = kernel.run("%load_ext labkit\n%dist_start -n 2 --device cpu")
        assert started.status == "ok"
        yield kernel


class Typist:
    """Types these lines, one for each question; then interrupts the kernel."""

    def __init__(self, kernel: Kernel, *lines: str) -> None:
        self.kernel = kernel
        self.lines = [*lines]
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if self.lines:
            return self.lines.pop(0)
        self.kernel.manager.interrupt_kernel()
        return ""


def typing(kernel: Kernel, cell: str, *lines: str) -> tuple[Reply, list[str], str]:
    """A cell in which these lines are typed: its reply, the prompts, and its output."""
    typist = Typist(kernel, *lines)
    reply = kernel.run(cell.strip(), timeout=120, on_input=typist)
    assert not typist.lines, f"asked {typist.prompts} only"
    return reply, typist.prompts, _ESCAPES.sub("", reply.stdout)


def assert_all_is_well(kernel: Kernel) -> None:
    code = "%%dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nprint(ones.item())"
    assert kernel.run(code).stdout == "[ranks 0-1] 2.0\n"


def test_input_is_asked_once_for_all_ranks_that_ask_the_same(kernel: Kernel) -> None:
    cell = "%%dist\nname = input('name? ')\nprint(name, rank)"
    reply, prompts, said = typing(kernel, cell, "ann")
    assert reply.status == "ok"
    assert prompts == ["[ranks 0-1] name? "]
    assert said == "[rank 0] ann 0\n[rank 1] ann 1\n"
    cell = "%%dist\nprint(input(f'of {rank}? '))"
    _, prompts, said = typing(kernel, cell, "a", "b")
    assert prompts == ["[rank 0] of 0? ", "[rank 1] of 1? "]
    assert "[rank 0] a\n" in said
    assert "[rank 1] b\n" in said


def test_a_command_goes_to_all_ranks_at_the_breakpoint(kernel: Kernel) -> None:
    reply, prompts, said = typing(kernel, BREAKS, "p x", "n", "p y", "c")
    assert reply.status == "ok"
    assert prompts == ["[ranks 0-1] ipdb> "] * 4
    # Python 3.13 stops at the breakpoint, former ones at the line that follows.
    assert re.search(r"---> (4     breakpoint|5     dist.all_reduce)", said)
    assert "[rank 0] tensor([1.])\n[rank 1] tensor([2.])\n" in said
    assert "[ranks 0-1] 6.0\n" in said
    assert_all_is_well(kernel)


def test_a_command_can_be_for_one_rank(kernel: Kernel) -> None:
    lines = "1: p y", "7: p y", "0: c", "1: c"
    reply, prompts, said = typing(kernel, BREAKS, *lines)
    assert reply.status == "ok"
    assert prompts == [*["[ranks 0-1] ipdb> "] * 3, "[rank 1] ipdb> "]
    assert "[rank 1] tensor([4.])\n" in said
    assert "ranks '7': this lab has the ranks 0, 1" in reply.stderr
    assert_all_is_well(kernel)


@pytest.mark.parametrize("lines", [("p x", "q"), ("p x",)], ids=["q", "the button"])
def test_the_cell_can_be_ended_at_a_breakpoint(
    kernel: Kernel, lines: tuple[str, ...]
) -> None:
    kernel.run("%%dist\ntotal = 'kept'")
    reply, _, _ = typing(kernel, BREAKS, *lines)
    assert reply.error["ename"] == "Interrupted"
    assert "every rank keeps its variables" in reply.error["evalue"]
    assert kernel.run("%%dist\nprint(total)").stdout == "[ranks 0-1] kept\n"
    assert_all_is_well(kernel)


def test_others_wait_in_a_collective_for_the_rank_at_its_breakpoint(
    kernel: Kernel,
) -> None:
    cell = (
        "%%dist\nimport sys\nif rank == 1: breakpoint()\nones = torch.ones(1)\n"
        "dist.all_reduce(ones)\nprint(ones.item(), sys.gettrace())"
    )
    reply, prompts, said = typing(kernel, cell, "b 6", "c", "p ones", "c")
    assert prompts == ["[rank 1] ipdb> "] * 4
    assert "tensor([2.])" in said
    assert reply.status == "ok"
    # No breakpoint of one cell slows the next one down.
    after = kernel.run("%%dist\nprint(sys.gettrace(), '__return__' in globals())")
    assert after.stdout == "[ranks 0-1] None False\n"


def test_with_pdb_on_the_debugger_opens_where_one_rank_fails(kernel: Kernel) -> None:
    kernel.run("%%dist\n%pdb on")
    cell = (
        "%%dist\ndef divide(a):\n    b = a * 2\n    return b / (rank - 1)\n"
        "if rank == 1: divide(4)\ndist.barrier()"
    )
    for end in ("c", "q"):
        reply, prompts, said = typing(kernel, cell, "p b", end)
        assert prompts == ["[rank 1] ipdb> "] * 2
        assert "[rank 1] 8\n" in said
        assert reply.error["ename"] == "RankError"
        assert "rank 1: failed at line 4" in reply.error["evalue"]
    later, prompts, _ = typing(kernel, "%%dist\n%pdb off\n%debug")
    assert prompts == []
    assert "Write %pdb on in a %%dist cell, and run the cell again" in later.stderr
    assert_all_is_well(kernel)


@pytest.mark.parametrize(
    ("call", "who", "first"),
    [
        ("import pdb; pdb.set_trace()", "ranks 0-1", "w"),
        ("dist.breakpoint()", "rank 0", "up"),
    ],
)
def test_other_debuggers_ask_too(
    kernel: Kernel, call: str, who: str, first: str
) -> None:
    cell = f"%%dist\ndef look(number):\n    {call}\n    return number\nlook(rank + 40)"
    reply, prompts, said = typing(kernel, cell, first, "p number", "c")
    assert prompts == [f"[{who}] (Pdb) "] * 3
    assert "[rank 0] 40\n" in said
    assert reply.status == "ok"
    assert_all_is_well(kernel)


def test_a_training_loop_goes_on_from_its_breakpoint(kernel: Kernel) -> None:
    cell = """
%%dist_train fsdp --timeout 60
import torch.nn.functional as F
from labkit.data import digits
from labkit.models import mlp
model = mlp()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, sgd, loader = prepare(model, sgd, digits(), batch_size=64)
for n, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    if n == 3:
        breakpoint()
    loss.backward()
    sgd.step()
    sgd.zero_grad()
"""
    whole = "p len(model[-1].weight.full_tensor())"
    reply, prompts, said = typing(kernel, cell, "n", whole, "c")
    assert reply.status == "ok"
    assert prompts == ["[ranks 0-1] ipdb> "] * 3
    assert "[ranks 0-1] 10\n" in said


@pytest.mark.parametrize("kind", ["a thread", "a DataLoader's worker"])
def test_nobody_can_type_for_what_no_interrupt_reaches(
    kernel: Kernel, kind: str
) -> None:
    code = {
        "a thread": "import threading\nthread = threading.Thread(target=breakpoint)\n"
        "thread.start()\nthread.join()",
        "a DataLoader's worker": "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(range(4), num_workers=1, "
        "collate_fn=lambda batch: breakpoint())\nprint(len(list(loader)))",
    }[kind]
    reply, prompts, _ = typing(kernel, f"%%dist\n{code}")
    assert reply.status == "ok"
    assert prompts == []
    assert_all_is_well(kernel)


def test_in_the_background_breakpoints_are_skipped(kernel: Kernel) -> None:
    cell = "run = %dist_train raw --background look\nrun.wait()\nprint(run.state)"
    kernel.run("def look():\n    breakpoint()\n")
    reply, prompts, _ = typing(kernel, cell)
    assert prompts == []
    assert reply.stdout == "finished\n"
    assert "is skipped: nobody can type here: with --background" in reply.stderr
