"""The same cells where there is no browser: notebooks run by programs, a terminal."""

import base64
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pexpect
import pytest
from isolation import own_environment
from isolation import processes_of
from kernels import wait_until
from kernels import write_notebook
from marks import release_but

pytestmark = [pytest.mark.timeout(300), pytest.mark.engine]

ROOT = Path(__file__).parents[1]
LIMIT_S = 15
JUPYTER = str(Path(sysconfig.get_path("scripts")) / "jupyter")
PICTURE = re.compile(r'src="data:image/png;base64,([^"]+)"')
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\a]*\a)")


def first_cells(num_epochs: int) -> list[str]:
    """The cells of the README that start ranks and train, with fewer epochs."""
    start, *others = re.findall(
        r"```python\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    train = next(cell for cell in others if "epochs=60)" in cell)
    return [start, train.replace("epochs=60)", f"epochs={num_epochs})")]


# ---- notebooks, run by a program ----


COMMANDS = {
    "jupyter execute": [JUPYTER, "execute", "--output=out", "in.ipynb"],
    "papermill": [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb"],
    "nbconvert": [
        *(JUPYTER, "nbconvert", "--execute", "--to=html", "--output=out", "in.ipynb")
    ],
}


def run_notebook(
    program: str, folder: Path, cells: list[str]
) -> "subprocess.CompletedProcess[str]":
    """Run a notebook of these cells in `folder`, and see that nothing is left."""
    write_notebook(folder / "in.ipynb", cells)
    done = subprocess.run(
        COMMANDS[program],
        cwd=folder,
        env=own_environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wait_until(lambda: not processes_of(folder), LIMIT_S, "processes are left")
    return done


def pictures_in(folder: Path) -> list[bytes]:
    """The pictures of the notebook that was written, in order."""
    if (page := folder / "out.html").exists():
        return [base64.b64decode(each) for each in PICTURE.findall(page.read_text())]
    notebook = nbformat.read(folder / "out.ipynb", as_version=4)
    return [
        base64.b64decode(output.data["image/png"])
        for cell in notebook.cells
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


@pytest.mark.parametrize(
    "program", release_but(["papermill", "nbconvert"], "nbconvert")
)
@pytest.mark.long
def test_a_notebook_run_by_a_program_holds_the_final_picture(
    program: str, tmp_path: Path
) -> None:
    drawn_at_the_end = "import labkit\nlabkit.current_lab().runs[-1].plot()"
    cells = [*first_cells(num_epochs=8), drawn_at_the_end]
    done = run_notebook(program, tmp_path, cells)
    assert done.returncode == 0, done.stderr
    live, final = pictures_in(tmp_path)
    assert live == final


@pytest.mark.parametrize(
    "program", release_but(["jupyter execute", "papermill"], "papermill")
)
@pytest.mark.long
def test_a_failing_rank_fails_the_program(program: str, tmp_path: Path) -> None:
    start = first_cells(num_epochs=1)[0]
    fail = "%%dist\nif rank == 1:\n    raise ValueError('one of us is wrong')"
    done = run_notebook(program, tmp_path, [start, fail, "print('too ' + 'far')"])
    assert done.returncode != 0
    assert "On rank 1:" in done.stderr
    assert "one of us is wrong" in done.stderr
    assert "too far" not in done.stderr


# ---- IPython in a terminal ----


class Terminal:
    """IPython in a terminal of 80 columns, and the one who types into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = own_environment(folder) | {
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody answers where the cursor is
        }
        environment.pop("COLUMNS", None)
        self._child = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", "--no-banner", "--no-confirm-exit"],
            env=environment,
            encoding="utf-8",
            timeout=120,
            dimensions=(24, 80),
        )
        self.num_cells = 1
        self._wait_for_prompt()

    def run(self, cell: str) -> str:
        """What appears under a cell, up to the next prompt; "\\r" is kept."""
        self.begin(cell)
        return self.rest()

    def begin(self, cell: str) -> None:
        """Paste a cell and let it run."""
        self._child.send(f"\x1b[200~{cell}\x1b[201~")
        self._child.send("\x1b\r")  # Enter alone may begin another line of the cell
        self._child.expect_exact("\x1b[?2004l")  # IPython has taken it
        self.num_cells += 1

    def wait_for(self, pattern: str) -> str:
        """What appears up to `pattern`, and with it."""
        self._child.expect(pattern)
        return ESCAPES.sub("", self._child.before + self._child.after)

    def rest(self) -> str:
        """What else appears before the next prompt."""
        return self._wait_for_prompt()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._child.sendintr()

    def leave(self) -> None:
        """Press Ctrl-D, and wait until IPython has ended."""
        self._child.sendeof()
        self._child.expect(pexpect.EOF)
        self._child.wait()

    def close(self) -> None:
        """Close the window."""
        self._child.close(force=True)

    def _wait_for_prompt(self) -> str:
        self._child.expect(rf"In \[(\x1b\[[0-9;]*m)*{self.num_cells}\D")
        return ESCAPES.sub("", self._child.before)


def as_seen(text: str) -> list[str]:
    """The lines that a terminal shows in the end: after "\\r" it writes over."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        seen = ""
        for part in line.split("\r"):
            seen = part + seen[len(part) :]
        lines.append(seen.rstrip())
    return lines


@contextmanager
def lab_in_terminal(folder: Path) -> Iterator[Terminal]:
    """IPython with a lab of two ranks."""
    terminal = Terminal(folder)
    try:
        terminal.run("%load_ext labkit")
        assert "Ready: 2 ranks" in terminal.run("%dist_start -n 2")
        yield terminal
    finally:
        terminal.close()


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    with lab_in_terminal(tmp_path_factory.mktemp("terminal")) as terminal:
        yield terminal


@pytest.mark.release
def test_a_line_of_text_follows_a_run_in_a_terminal(terminal: Terminal) -> None:
    shown = terminal.run(first_cells(num_epochs=40)[1])
    states = re.findall(r"run-1: ddp on 2 ranks, [^\r]+", shown)
    *running, finished = [each.rstrip() for each in states]
    assert len(set(running)) >= 2
    assert all(len(each) < 80 for each in running), "a line that wraps piles up"
    assert re.search(r"finished, epoch 40/40, step 920/920, .*\d s\b", finished)
    assert [each for each in as_seen(shown) if each] == [
        finished,
        f"Out[{terminal.num_cells - 1}]: "
        "<Run 'run-1': ddp on 2 ranks, finished, 920 steps>",
    ]


STEPS_BY_HAND = """
import time
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(9):
    weight.sum().backward()
    optimizer.step()
    time.sleep(0.2)
    if step % 4 == 0:
        print("did step", step)
"""


@pytest.mark.long
def test_what_ranks_print_has_lines_of_its_own(terminal: Terminal) -> None:
    shown = terminal.run(f"%%dist_train raw --name talks{STEPS_BY_HAND}")
    assert shown.count("talks: raw on 2 ranks, step") >= 2
    seen = [each for each in as_seen(shown) if each]
    assert [each.split("] ")[-1].strip() for each in seen[:3]] == [
        *("did step 0", "did step 4", "did step 8")
    ]
    assert seen[3].startswith("talks: raw on 2 ranks, finished")


def test_a_function_of_the_terminal_trains(terminal: Terminal) -> None:
    terminal.run(
        "def by_hand(rank, world_size):\n"
        "    import torch\n"
        "    weight = torch.nn.Parameter(torch.ones(1))\n"
        "    weight.sum().backward()\n"
        "    torch.optim.SGD([weight], lr=0.1).step()\n"
    )
    shown = terminal.run("%dist_train raw by_hand --name of-a-function")
    assert "<Run 'of-a-function': raw on 2 ranks, finished, 1 step" in shown


def test_ctrl_c_ends_a_run_and_the_next_cell_works(terminal: Terminal) -> None:
    endless = "while True:\n    weight.sum().backward()\n    optimizer.step()"
    prepare = "weight = torch.nn.Parameter(torch.ones(1))\noptimizer = "
    prepare += "torch.optim.SGD([weight], lr=0.1)\n"
    terminal.begin(f"%%dist_train raw --name endless\n{prepare}{endless}")
    terminal.wait_for(r"endless: raw on 2 ranks, step \d+")
    terminal.interrupt()
    shown = terminal.rest()
    assert "endless: raw on 2 ranks, interrupted" in shown
    assert "Interrupted; every rank keeps its variables." in shown
    assert "rank 0: stopped at line" in shown
    assert "rank 1: stopped at line" in shown
    assert "Traceback" not in shown
    shown = terminal.run("%%dist\ndist.barrier()\nprint('all', world_size)")
    assert as_seen(shown)[0] == "[ranks 0-1] all 2"


def test_a_failing_rank_is_shown_in_a_terminal(terminal: Terminal) -> None:
    shown = terminal.run("%%dist\nif rank == 1:\n    raise ValueError('wrong')")
    assert "On rank 1:" in shown
    assert "ValueError: wrong" in shown
    assert as_seen(terminal.run("1 + 1"))[0].endswith(": 2")


@pytest.mark.release
def test_ctrl_c_while_a_lab_starts_leaves_nothing(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    try:
        terminal.run("%load_ext labkit")
        for moment in ("starting 2 engines", "creating the process"):
            terminal.begin("%dist_start -n 2")
            terminal.wait_for(moment)
            terminal.interrupt()
            assert "Interrupted; nothing is left running." in terminal.rest()
            [ipython] = processes_of(tmp_path)
        assert "Ready: 2 ranks" in terminal.run("%dist_start -n 2")
        assert ipython.is_running()
    finally:
        terminal.close()
    wait_until(lambda: not processes_of(tmp_path), LIMIT_S, "processes are left")


def test_leaving_ipython_leaves_no_process_behind(terminal: Terminal) -> None:
    assert len(processes_of(terminal.folder)) >= 5
    terminal.leave()
    wait_until(lambda: not processes_of(terminal.folder), LIMIT_S, "processes are left")


@pytest.mark.release
def test_closing_the_window_in_a_run_leaves_no_process_behind(tmp_path: Path) -> None:
    with lab_in_terminal(tmp_path) as terminal:
        terminal.begin("%%dist\nprint('begun')\nwhile True: pass")
        terminal.wait_for("begun")
    wait_until(lambda: not processes_of(tmp_path), LIMIT_S, "processes are left")
