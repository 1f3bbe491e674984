"""Code that was written as a script, by somebody else: what it leaves on a rank is put
right, and what it says is heard."""

import re
from pathlib import Path

import pytest

from labkit import Lab
from labkit import RankError
from labkit.notebook.failure import CellTimeoutError

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


def shown(error: RankError) -> str:
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
    text = shown(error)
    assert "ValueError: on purpose" in text
    assert "in step()" in text
    assert "safe_execfile" not in text, "IPython's own frames say nothing"
    assert lab.pull("kept", "all") == [5, 5]
    outer = tmp_path / "outer.py"
    outer.write_text(f"get_ipython().run_line_magic('run', '{script}')\n")
    assert "in step()" in shown(fails(lab, f"%run {outer}"))
    (tmp_path / "as_module.py").write_text(script.read_text())
    code = f"import sys; sys.path.insert(0, '{tmp_path}')\n%run -m as_module"
    assert "in step()" in shown(fails(lab, code))
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
    assert "ValueError: on purpose" in shown(error)
    assert lab.pull("kept", 1) == show
    lab.run(code.format(show="traceback.print_exc()", wait="pass"))
    assert "on purpose" in capsys.readouterr().err
