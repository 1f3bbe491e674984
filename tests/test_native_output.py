"""What other programs print in a cell is shown in order, and before the cell ends."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import wait_until

from labkit import Lab
from labkit import RankError
from labkit.notebook.execution.errors import Interrupted
from labkit.rank.terminal.native_output import NativeOutput

pytestmark = pytest.mark.timeout(120)

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """Of a file that is open for writing."""
    descriptor = os.open(tmp_path / "before", os.O_CREAT | os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(params=[1])
def capturing_lab(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> Iterator[Lab]:
    """Ranks, one by default, whose file descriptors ipykernel captures, which it leaves
    alone under pytest."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Lab(num_ranks=request.param) as lab:
        capsys.readouterr()
        yield lab


def say(descriptor: int, text: str) -> None:
    subprocess.run(["sh", "-c", text], stdout=descriptor, check=True)


def test_what_a_program_has_printed_can_be_waited_for(
    tmp_path: Path, descriptor: int
) -> None:
    shown: list[str] = []
    with (tmp_path / "log").open("wb") as log:
        output = NativeOutput(shown.append, descriptor, log.fileno())
        for number in range(50):
            say(descriptor, f"echo {number}")
            output.wait()
            assert "".join(shown).split() == [*map(str, range(number + 1))]
    assert (tmp_path / "log").read_text() == "".join(shown)


def test_what_a_program_prints_is_shown_while_it_runs(
    tmp_path: Path, descriptor: int
) -> None:
    shown: list[str] = []
    with (tmp_path / "log").open("wb") as log:
        NativeOutput(shown.append, descriptor, log.fileno())
        say(descriptor, "seq 1 30000")  # more than a pipe holds
        wait_until(lambda: "".join(shown).endswith("30000\n"), 30, "the last line")
    assert "".join(shown).split() == [*map(str, range(1, 30001))]


def test_what_never_ends_is_waited_for_once(tmp_path: Path, descriptor: int) -> None:
    """As of a program in the background that prints more than is shown."""
    turns = threading.Semaphore(0)
    shown: list[str] = []

    def show(text: str) -> None:
        """Takes its time: the program has filled the pipe again by then."""
        shown.append(text)
        turns.acquire()
        while program.poll() is None and not is_full(output):
            time.sleep(0.001)

    with (tmp_path / "log").open("wb") as log:
        output = NativeOutput(show, descriptor, log.fileno())
        program = subprocess.Popen(["yes"], stdout=descriptor)
        try:
            wait_until(lambda: bool(shown), 30, "the first lines")
            turns.release(2)
            output.wait()
            # There is no turn for what it would be waited for again.
            waiting = threading.Thread(target=output.wait, daemon=True)
            waiting.start()
            waiting.join(30)
            assert not waiting.is_alive()
        finally:
            program.kill()
            program.wait()
            turns.release(100)
        output.wait()
        output.wait()  # now there is an end
        say(descriptor, "echo last")
        output.wait()
        assert shown[-1] == "last\n"


def is_full(output: NativeOutput) -> bool:
    """Whether no other byte fits into the pipe of the usual size."""
    found = fcntl.ioctl(output._pipe, termios.FIONREAD, bytes(4))
    return int.from_bytes(found, sys.byteorder) == 2**16


def test_a_character_in_two_pieces_is_one(tmp_path: Path, descriptor: int) -> None:
    shown: list[str] = []
    with (tmp_path / "log").open("wb") as log:
        output = NativeOutput(shown.append, descriptor, log.fileno())
        for piece in "ä\n".encode():
            os.write(descriptor, bytes([piece]))
            output.wait()
    assert "".join(shown) == "ä\n"


@pytest.mark.long
@pytest.mark.parametrize("capturing_lab", [2], indirect=True)
def test_programs_and_cells_print_in_order(
    capturing_lab: Lab, capsys: Captured
) -> None:
    for _ in range(5):
        capturing_lab.run(
            "import os, sys\n"
            "print('a')\n"
            "_ = os.system('echo b')\n"
            "print('c', file=sys.stderr)\n"
            "os.system('echo d')"
        )
        captured = capsys.readouterr()
        words = captured.out.replace("[ranks 0-1]", "").split()
        assert words == [*"abd0"]
        assert captured.err.split() == ["[ranks", "0-1]", "c"]
    capturing_lab.run("os.close(1)\nprint('no descriptor')")
    capturing_lab.run("print('as before')")
    assert capsys.readouterr().out.count("[ranks 0-1]") == 2


@pytest.mark.long
def test_forks_take_nothing_that_the_rank_is_to_show(
    capturing_lab: Lab, capsys: Captured
) -> None:
    """Also where something has kept the stream's `write` of before, as a bar does."""
    capturing_lab.run(
        "import os, sys, threading\n"
        "write, others = sys.stdout.write, threading.Event()\n"
        "def print_natively():\n"
        "    while not others.wait(0.0002):\n"
        "        os.write(2, b'noise\\n')\n"
        "noise = threading.Thread(target=print_natively)\n"
        "noise.start()\n"
        "for number in range(30):\n"
        "    if (pid := os.fork()) == 0:\n"
        "        os.system(f'echo line {number}')\n"
        "        write('')\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "others.set()\n"
        "noise.join()",
        timeout=60,
    )
    shown = capsys.readouterr().out
    assert re.findall(r"line (\d+)", shown) == [*map(str, range(30))]


@pytest.mark.long
def test_an_interrupt_loses_nothing_that_was_written(
    capturing_lab: Lab, capsys: Captured
) -> None:
    for _ in range(10):
        stop = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
        stop.start()
        with pytest.raises(Interrupted):
            capturing_lab.run(
                "import os\n"
                "count = 0\n"
                "while True:\n"
                "    line, count = f'line {count};\\n'.encode(), count + 1\n"
                "    _ = os.write(1, line)\n"
                "    print(end='')"
            )
        numbers = re.findall(r"line (\d+);", capsys.readouterr().out)
        assert numbers == [*map(str, range(len(numbers)))]
        count = capturing_lab.pull("count", 0)
        assert len(numbers) in (count, count - 1)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "import ctypes\n"
            "ctypes.CDLL(None).__assert_fail(b'i < n', b'a.cu', 9, b'f')",
            r"native code aborted, after it printed \".*a.cu:9: f: Assertion `i < n'",
        ),
        (
            "import os\nos.write(2, b'NCCL fatal: no\\n\\xff'); os._exit(7)",
            r"exit code 7, after it printed \"NCCL fatal: no; \ufffd\"",
        ),
        ("import os\nos._exit(7)", "ended with exit code 7;"),
        (
            "import ctypes, faulthandler\nfaulthandler.enable()\nctypes.string_at(0)",
            r"died at line 3: .*a crash in native code, in string_at at",
        ),
    ],
)
@pytest.mark.long
def test_the_last_words_of_native_code_are_told(
    capturing_lab: Lab, code: str, told: str
) -> None:
    """Also those that the process itself had not read when it died."""
    with pytest.raises(RankError, match=told):
        capturing_lab.run(code)


@pytest.mark.long
def test_a_line_of_native_code_is_shown_where_it_ends(
    capturing_lab: Lab, capsys: Captured
) -> None:
    capturing_lab.run(
        "import ctypes, sys\n"
        "ctypes.CDLL(None).printf(b'of C\\n')\n"
        "print('of the cell')\n"
        "print('of a library', file=sys.__stdout__)\n"
        "print('the end')"
    )
    words = capsys.readouterr().out.replace("[rank 0]", "").splitlines()
    said = ["of C", "of the cell", "of a library", "the end"]
    assert [*map(str.strip, words)] == said


@pytest.mark.long
def test_a_program_prints_to_the_streams_of_the_cell(
    capturing_lab: Lab, capsys: Captured
) -> None:
    capturing_lab.run(
        "import faulthandler, subprocess, sys\n"
        "_ = subprocess.run(['echo', 'hello'], stdout=sys.stdout)\n"
        "faulthandler.dump_traceback()"
    )
    captured = capsys.readouterr()
    assert "hello" in captured.out
    assert "most recent call first" in captured.err
