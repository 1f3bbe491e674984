"""Code that was written as a script, by somebody else: what it leaves on a rank is put
right, and what it says is heard."""

import os
import re
from pathlib import Path

import IPython.display
import pytest
from kernels import wait_until

from labkit import Lab
from labkit import RankError
from labkit.notebook.execution.errors import CellTimeoutError

pytestmark = pytest.mark.timeout(120)

Captured = pytest.CaptureFixture[str]
ESCAPES = re.compile(r"\x1b\[[\d;]*m")

LAUNCHED = """
import os
import sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
launched = {name: os.environ.get(name) for name in [*names, "MASTER_PORT"]}
"""


# ---- the environment ----


def test_what_a_launcher_sets_is_whole_after_every_cell(lab: Lab) -> None:
    lab.run(LAUNCHED)
    before = lab.pull("launched", "all")
    for rank, launched in enumerate(before):
        assert launched == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": before[0]["MASTER_PORT"],
        }
    lab.run("del os.environ['WORLD_SIZE']\nos.environ['MASTER_PORT'] = '29500'")
    lab.run(LAUNCHED)
    assert lab.pull("launched", "all") == before


OWN_STORE = """
import os
from datetime import timedelta
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
wait = timedelta(seconds=20)
own = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=wait)
own.set(f"from {rank}", "x")
own.wait(["from 0", "from 1"])
dist.barrier()
del own
"""
OWN_PROCESS = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("a rank of", dist.get_world_size())
"""


def test_a_script_may_host_a_store_at_the_master_port(lab: Lab) -> None:
    lab.run(OWN_STORE)
    with pytest.raises(RankError):
        lab.run("if rank == 0: raise ValueError\ndist.barrier()")
    lab.run(OWN_STORE)


@pytest.mark.long
def test_processes_of_a_cell_form_a_group_of_their_own(
    lab: Lab, tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_PROCESS)
    command = f"[sys.executable, {str(script)!r}]"
    lab.run(
        "import subprocess, sys\n"
        f"said = subprocess.check_output({command}, text=True)\n"
    )
    assert lab.pull("said", "all") == ["a rank of 2\n"] * 2


def test_single_is_launched_as_one_rank(lab: Lab) -> None:
    lab.train("single", LAUNCHED, live=False)
    assert lab.pull("launched")["WORLD_SIZE"] == "1"
    lab.run(LAUNCHED)
    assert lab.pull("launched")["WORLD_SIZE"] == "2"


def test_a_rank_does_not_look_as_if_somebody_typed(lab: Lab) -> None:
    """Lightning refuses to train under strategies that it says are for scripts."""
    lab.run("import sys\nhas_prompt = hasattr(sys, 'ps1')")
    assert lab.pull("has_prompt", "all") == [False, False]


# ---- scripts that fail ----


def fails(lab: Lab, code: str) -> RankError:
    with pytest.raises(RankError) as caught:
        lab.run(code, timeout=30)
    return caught.value


def short_repr(error: RankError) -> str:
    return ESCAPES.sub("", "\n".join(error._render_traceback_()))


def test_a_script_that_raises_has_failed_as_if_the_cell_had(
    lab: Lab, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport torch.distributed as dist\n\n\n"
        "def step():\n    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('on purpose')\n    dist.barrier()\n\n\nstep()\n"
    )
    error = fails(lab, f"kept = 5\n%run {script} --epochs 3\nkept = 6")
    assert (error.rank, error.outcomes[0].status) == (1, "interrupted")
    text = short_repr(error)
    assert "ValueError: on purpose" in text
    assert "in step()" in text
    assert "safe_execfile" not in text, "IPython's own frames say nothing"
    assert lab.pull("kept", "all") == [5, 5]
    outer = tmp_path / "outer.py"
    outer.write_text(f"get_ipython().run_line_magic('run', '{script}')\n")
    assert "in step()" in short_repr(fails(lab, f"%run {outer}"))
    (tmp_path / "as_module.py").write_text(script.read_text())
    code = f"import sys; sys.path.insert(0, '{tmp_path}')\n%run -m as_module"
    assert "in step()" in short_repr(fails(lab, code))
    lab.run("del sys.path[0]")
    with pytest.raises(RankError):
        lab.train("raw", f"%run {script}", live=False)
    assert lab.runs[-1].state == "failed"


@pytest.mark.parametrize("how", ["", "-e ", "-i ", "-m "])
def test_a_script_may_exit_and_says_how_it_went(
    lab: Lab, tmp_path: Path, how: str
) -> None:
    (tmp_path / "leave.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    script = "leave" if how == "-m " else tmp_path / "leave.py"
    lab.run(f"import sys; sys.path.insert(0, '{tmp_path}')")
    lab.run(f"%run {how}{script} 0\nafter = True")
    assert lab.pull("after", "all") == [True, True]
    if how == "-e ":  # which is for that
        lab.run(f"%run {how}{script} 3")
    else:
        assert "SystemExit: 3" in str(fails(lab, f"%run {how}{script} 3"))
    lab.run("del sys.path[0]")


def test_an_interrupt_ends_a_script(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text("while True:\n    pass\n")
    with pytest.raises(CellTimeoutError, match=r"rank 1: stopped"):
        lab.run(f"%run {script}\nafter = 1", timeout=1)


def test_a_traceback_that_ipython_shows_is_a_failure_and_one_printed_is_not(
    lab: Lab, capsys: Captured
) -> None:
    code = (
        "import traceback\n"
        "try:\n    if rank == 1: raise ValueError('on purpose')\n"
        "    {wait}\n"
        "except ValueError:\n    {show}\nkept = '{show}'"
    )
    show = "get_ipython().showtraceback()"
    error = fails(lab, code.format(show=show, wait="dist.barrier()"))
    assert (error.rank, error.outcomes[0].status) == (1, "interrupted")
    assert "ValueError: on purpose" in short_repr(error)
    assert lab.pull("kept", 1) == show
    lab.run(code.format(show="traceback.print_exc()", wait="pass"))
    assert "on purpose" in capsys.readouterr().err


# ---- what a cell prints to ----

SILENCED = {
    "stdout": "if rank: sys.stdout = open(os.devnull, 'w')",
    "stderr": "if rank: sys.stderr = open(os.devnull, 'w')",
    "closed": "if rank: sys.stdout = open(os.devnull, 'w'); sys.stdout.close()",
    "print": "import builtins\nif rank: builtins.print = lambda *w, **more: None",
    "redirected": (
        "import contextlib, io\n"
        "if rank: redirect = contextlib.redirect_stdout(io.StringIO())\n"
        "if rank: redirect.__enter__()"
    ),
}


@pytest.mark.parametrize("how", SILENCED)
def test_a_rank_is_silent_until_the_end_of_the_cell_that_silenced_it(
    lab: Lab, capsys: Captured, how: str
) -> None:
    silence = f"import os, sys\n{SILENCED[how]}\n"
    out = "stderr" if how == "stderr" else "stdout"
    if how != "closed":
        lab.run(f"{silence}print('first', file=sys.{out})")
        assert getattr(capsys.readouterr(), out[3:]) == "[rank 0] first\n"
    with pytest.raises(RankError, match="on purpose"):
        lab.run(f"{silence}raise ValueError('on purpose')")
    capsys.readouterr()
    lab.run(f"import sys\nprint('next', file=sys.{out})")
    assert getattr(capsys.readouterr(), out[3:]) == "[ranks 0-1] next\n"


PRINTS_LATER = """
import threading

def later():
    open({!r}).read()  # which waits until somebody writes to it
    print("it is late")
    raise ValueError("in a thread")

threading.Thread(target=later).start()
"""


def test_what_a_thread_prints_after_its_cell_is_heard(
    lab: Lab, capsys: Captured, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    lab.run(PRINTS_LATER.format(str(tmp_path / "fifo")), "1")
    lab.push(unrelated=1)
    (tmp_path / "fifo").write_text("go on")
    said: list[str] = []

    def is_heard() -> bool:
        said.extend(capsys.readouterr())
        words = ["[rank 1] it is late\n", "ValueError: in a thread\n"]
        text = ESCAPES.sub("", "".join(said))  # Python 3.13 colours a traceback
        return all(each in text for each in words)

    wait_until(is_heard, 20, "what the thread printed")


def test_breakpoint_says_that_nobody_can_type(lab: Lab, capsys: Captured) -> None:
    lab.run("def look():\n    breakpoint()\n    print('went on')\nlook()")
    captured = capsys.readouterr()
    assert "breakpoint() in look, line 2, is skipped: nobody can" in captured.err
    assert "[ranks 0-1] went on" in captured.out


def test_no_debugger_opens_on_a_rank(lab: Lab, capsys: Captured) -> None:
    lab.run("%pdb on")
    with pytest.raises(RankError, match="division by zero"):
        lab.run("1 / 0")
    assert "no debugger opens here: nobody can type" in capsys.readouterr().err
    lab.run("%pdb off\n%debug")
    assert "no debugger opens here: nobody can type" in capsys.readouterr().err


def test_what_goes_to_a_pager_is_shown(lab: Lab, capsys: Captured) -> None:
    lab.run("len?")
    assert "Return the number of items" in capsys.readouterr().out


def test_equal_warnings_of_ranks_are_one(lab: Lab, capsys: Captured) -> None:
    lab.run("import warnings\nwarnings.warn('on purpose')")
    said = capsys.readouterr().err
    assert said.count("UserWarning: on purpose") == 1
    assert said.startswith("[ranks 0-1] ")


def test_ranks_that_all_clear_their_output_clear_the_cells(
    lab: Lab, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(IPython.display, "clear_output", cleared.append)
    code = (
        "from IPython.display import clear_output\nprint(rank)\nclear_output(wait={})"
    )
    lab.run(code.format(True))
    assert cleared == [True]
    lab.run(f"if rank: {code.format(False).replace(chr(10), '; ')}")
    assert cleared == [True, False]


# ---- where it runs ----


def test_ranks_follow_the_notebook_into_another_folder(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "import os\nhere = os.getcwd()"
    for name in ("notebooks", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    lab.run(where)
    assert lab.pull("here", "all") == [str(tmp_path / "notebooks")] * 2
    lab.run("%cd -q ../elsewhere", "1")
    lab.train("raw", where, live=False)  # the notebook has not moved since
    assert lab.pull("here", 1) == str(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    lab.run(where, "1")
    assert lab.pull("here", 1) == str(tmp_path)


# ---- errors in a library's words ----

HINTS = {
    "torch.cuda.set_device(rank)": "device is cpu; write `device`",
    "torch.ones(1).to(rank)": "device is cpu; write `device`",
    "torch.ones(1).cuda()": "device is cpu; write `device`",
    "torch.nn.parallel.DistributedDataParallel(\n"
    "    torch.nn.Linear(1, 1), device_ids=[rank])": "Leave out torch.cuda.set_device",
    "import pdb\npdb.set_trace()\npass": "nobody can type here",
    "input('how many? ')": "nobody can type here",
    "dist.breakpoint()": "nobody can type here",
    "%%dist_train ddp\n1": "labkit's magics run in the notebook",
    "%load_ext labkit\n%dist_status": "labkit's magics run in the notebook",
    "%dist_push x": "labkit's magics run in the notebook",
}


def test_an_error_says_what_to_write_instead(lab: Lab) -> None:
    for code, hint in HINTS.items():
        error = fails(lab, code)
        assert hint in str(error), code
        assert hint in short_repr(error), code
    error = fails(
        lab, "problem = ValueError('x')\nproblem.add_note('y')\nraise problem"
    )
    assert str(error).startswith("rank 0: failed at line 3: raise problem\n")
    assert "\nValueError: x\ny" in str(error)


def test_a_task_of_another_cell_that_is_awaited_is_explained(lab: Lab) -> None:
    lab.run("import asyncio\ntask = asyncio.create_task(asyncio.sleep(60))")
    error = fails(lab, "await task")
    assert "make the task in the cell that awaits it" in str(error)
    lab.run("task.get_loop().call_soon_threadsafe(task.cancel);")


def test_a_loop_that_wraps_the_model_itself_gets_no_words_about_strategies(
    lab: Lab,
) -> None:
    code = "torch.nn.Linear(1, 1).weight.grad.norm()"
    for strategy, is_told in ("ddp", True), ("raw", False):
        with pytest.raises(RankError) as found:
            lab.train(strategy, code, live=False)
        assert ("under ZeRO" in str(found.value)) == is_told
    assert "under ZeRO" in str(fails(lab, code))  # a model from before may be in use


def test_a_rank_says_that_it_compiles(
    lab: Lab, capsys: Captured, tmp_path: Path
) -> None:
    (tmp_path / "one.cpp").write_text("int one() { return 1; }\n")
    code = (
        "from torch.utils import cpp_extension\n"
        f"cpp_extension.load('one', [{str(tmp_path / 'one.cpp')!r}],\n"
        f"    build_directory={str(tmp_path)!r}, is_python_module=False)"
    )
    lab.run(code, "1")
    assert "[rank 1] labkit: compiling the C++ extension one" in capsys.readouterr().err
    lab.run(code)
    assert "compiling" not in capsys.readouterr().err


# ---- rpc ----

CALL_THE_NEXT = """
import torch.distributed.rpc as rpc
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size)
if rank in fails_on: raise ValueError("on purpose")
found = rpc.rpc_sync(f"rank{1 - rank}", torch.add, args=(torch.ones(1), rank)).item()
rpc.shutdown()
"""


@pytest.mark.parametrize("fails_on", [(1,), (0, 1)])
@pytest.mark.long
def test_rpc_can_begin_again_after_a_cell_that_failed_in_it(
    lab: Lab, fails_on: tuple[int, ...]
) -> None:
    lab.run("fails_on = ()")
    lab.run(CALL_THE_NEXT, timeout=30)
    lab.run(f"fails_on = {fails_on}")
    for _ in range(2):
        assert "on purpose" in str(fails(lab, CALL_THE_NEXT))
    lab.run("fails_on = ()")
    lab.run(CALL_THE_NEXT, timeout=30)
    assert lab.pull("found", "all") == [1.0, 2.0]
