"""Typing for ranks: `input`, breakpoints, and the debugger where a cell fails."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any

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
    # A secret is asked for by itself.
    cell = (
        "%%dist\nimport getpass\nprint((getpass.getpass if rank else input)('key? '))"
    )
    _, prompts, said = typing(kernel, cell, "a", "b")
    assert prompts == ["[rank 0] key? ", "[rank 1] key? "]
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


def test_a_breakpoint_has_a_header_and_can_be_switched_off(kernel: Kernel) -> None:
    cell = BREAKS.replace("breakpoint()", "breakpoint(header=f'y is {y.item()}')")
    reply, _, said = typing(kernel, cell, "c")
    assert reply.status == "ok"
    assert "[rank 0] y is 2.0\n" in said
    own = (
        "%%dist\nimport os, sys, types\nown = types.ModuleType('own')\n"
        "own.hook = lambda **given: print(given)\nsys.modules['own'] = own\n"
        "os.environ['PYTHONBREAKPOINT'] = 'own.hook'\nbreakpoint(header='here')"
    )
    assert kernel.run(own).stdout == "[ranks 0-1] {'header': 'here'}\n"
    for value in ("0", ""):
        cell = f"%%dist\nimport os\nos.environ['PYTHONBREAKPOINT'] = {value!r}"
        assert kernel.run(cell).status == "ok"
        _, prompts, said = typing(kernel, BREAKS, *["c"] * (value == ""))
        assert len(prompts) == (value == "")
        assert "[ranks 0-1] 6.0\n" in said


def test_a_command_can_be_for_one_rank(kernel: Kernel) -> None:
    lines = "1:p y", "7: p y", "0: c", "1: c"
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


@pytest.mark.parametrize("line", ["EOF", "quit()", "p 1;; q"])
def test_other_words_for_q_end_the_cell_too(kernel: Kernel, line: str) -> None:
    reply, _, _ = typing(kernel, BREAKS, line)
    # Python 3.13 and newer stop in the line of the call, and not at the next one.
    line_of_stop = 4 if sys.version_info >= (3, 13) else 5
    assert f"stopped at line {line_of_stop}" in reply.error["evalue"]
    assert "BdbQuit" not in reply.error["evalue"]
    assert_all_is_well(kernel)


@pytest.mark.parametrize(
    "cell",
    [
        "breakpoint()",
        "while True:\n    try: input()\n    except KeyboardInterrupt: pass",
    ],
    ids=["interact", "a loop"],
)
def test_the_button_ends_what_asks_again_when_interrupted(
    kernel: Kernel, cell: str
) -> None:
    lines = ["interact", "2 + 2"] if cell == "breakpoint()" else []
    reply, _, _ = typing(kernel, f"%%dist\n{cell}", *lines)
    assert reply.error["ename"] == "Interrupted"
    assert "every rank keeps its variables" in reply.error["evalue"]
    assert_all_is_well(kernel)


def test_a_breakpoints_commands_are_typed_in_its_own_prompt(kernel: Kernel) -> None:
    lines = ["b 6", "commands", "p y", "c", "c"]
    reply, prompts, said = typing(kernel, BREAKS, *lines)
    assert prompts[2] == "[ranks 0-1] (com) "
    assert "tensor([6.])" in said
    assert reply.status == "ok"
    reply, _, said = typing(kernel, BREAKS, "commands")
    assert reply.error["ename"] == "Interrupted"
    assert_all_is_well(kernel)


def test_a_debugger_within_the_debugger_takes_commands_too(kernel: Kernel) -> None:
    lines = ["debug double(3)", "1: p rank", "0: p rank", "q"]
    reply, prompts, said = typing(kernel, BREAKS, *lines)
    assert prompts[1:] == ["[ranks 0-1] (ipdb>) "] * 3
    assert "[rank 1] 1\n" in said
    assert reply.error["ename"] == "Interrupted"


def test_a_console_leads_back_and_a_cell_does_not_start_over(kernel: Kernel) -> None:
    typed = "interact", "y += 1", "1 / 0", "exit()"
    lines = *typed, "restart", "run", "p y.item()", "c"
    cell = f"{BREAKS}# without the breakpoints of other tests"
    reply, _, said = typing(kernel, cell, *lines)
    assert reply.status == "ok"
    # Since Python 3.13 a console within pdb writes its errors to stdout.
    assert (reply.stderr + said).count("ZeroDivisionError") == 1
    assert said.count("a cell cannot start over here") == 2
    assert "[rank 0] 3.0\n[rank 1] 5.0\n" in said
    assert_all_is_well(kernel)


def test_n_goes_from_one_statement_of_the_cell_to_the_next(kernel: Kernel) -> None:
    cell = (
        "%%dist\nbreakpoint()\ntwo = 2\nfor each in range(1):\n    three = 3\n"
        "%time four = 4\nfive = 5"
    )
    reply, _, said = typing(kernel, cell, *["n"] * 7)
    assert reply.status == "ok"
    stops = re.findall(r"^[^(\n]*\w+/(\d+)\.py\((\d+)\)<module>", said, re.MULTILINE)
    assert [int(line) for _, line in stops] == [2, 3, 4, 5, 4, 6, 7]
    assert "interactiveshell" not in said
    assert said.count("--Return--") <= 1  # of breakpoint() itself


def test_an_interrupt_after_c_opens_no_debugger(kernel: Kernel) -> None:
    cell = (
        "%%dist\nimport pdb, time\ndef wait():\n    pdb.set_trace()\n"
        "    print('wai' + 'ts', flush=True)\n    while True: time.sleep(0.01)\nwait()"
    )

    def interrupt_once_waiting(message: dict[str, Any]) -> None:
        if "waits" in message["content"].get("text", ""):
            kernel.manager.interrupt_kernel()

    reply = kernel.run(cell, on_message=interrupt_once_waiting, on_input=lambda _: "c")
    assert reply.error["ename"] == "Interrupted"
    assert "Program interrupted" not in reply.stdout
    assert_all_is_well(kernel)


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("breakpoint()", ["p seen", "c"]),
        ("breakpoint()", ["p seen", "q"]),
        ("breakpoint()", ["p seen", "n", "n", "n"]),
        ("1 / 0", ["p seen", "q"]),
    ],
)
def test_nothing_is_kept_of_what_a_debugger_has_shown(
    kernel: Kernel, line: str, lines: list[str]
) -> None:
    kernel.run("%%dist\n%pdb on")
    cell = (
        "%%dist\nimport weakref\ndef look():\n    seen = torch.ones(3)\n"
        f"    global ref\n    ref = weakref.ref(seen)\n    {line}\n    done = 1\nlook()"
    )
    _, _, said = typing(kernel, cell, *lines)
    kernel.run("%%dist\n%pdb off")
    assert "tensor([1., 1., 1.])" in said
    after = kernel.run("%%dist\nprint(ref() is None, '__return__' in globals())")
    assert after.stdout == "[ranks 0-1] True False\n"


def test_a_rank_that_is_not_at_the_prompt_is_named(kernel: Kernel) -> None:
    cell = "%%dist\nif rank == 0: breakpoint()\ndist.barrier()"
    reply, _, _ = typing(kernel, cell, "1: p rank", "c")
    assert "rank 1 cannot take a command now; at the prompt: rank 0" in reply.stderr
    assert reply.status == "ok"


def test_a_rank_dies_while_it_is_asked(kernel: Kernel) -> None:
    pids = kernel.run("%%dist\nimport os\nprint(os.getpid())").stdout
    victim = int(re.findall(r"rank 1\] (\d+)", pids)[0])

    def kill(prompt: str) -> str:
        os.kill(victim, signal.SIGKILL)
        return "p y"

    reply = kernel.run(BREAKS.strip(), on_input=kill)
    assert reply.error["ename"] == "RankError"
    assert "rank 1: the process died" in reply.error["evalue"]
    kernel.run("%dist_restart")
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
%%dist_train fsdp --timeout 60 --accumulate 2
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
    assert "breakpoint" not in reply.stderr  # it is no part of a step


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
    if kind == "a thread":
        assert "only the main thread of a rank can ask you" in reply.stderr
    assert_all_is_well(kernel)


def test_in_the_background_breakpoints_are_skipped(kernel: Kernel) -> None:
    cell = "run = %dist_train raw --background look\nrun.wait()\nprint(run.state)"
    kernel.run("def look():\n    breakpoint()\n")
    reply, prompts, _ = typing(kernel, cell)
    assert prompts == []
    assert reply.stdout == "finished\n"
    assert "is skipped: nobody can type here: with --background" in reply.stderr
