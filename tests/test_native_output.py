"""What other programs print in a cell is shown in order, and before the cell ends."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import wait_until

from labkit import Lab
from labkit.rank.terminal.native_output import NativeOutput

pytestmark = pytest.mark.timeout(120)

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """Of a file that is open for writing."""
    descriptor = os.open(tmp_path / "before", os.O_CREAT | os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def say(descriptor: int, text: str) -> None:
    subprocess.run(["sh", "-c", text], stdout=descriptor, check=True)


def test_what_a_program_has_printed_is_taken_at_once(
    tmp_path: Path, descriptor: int
) -> None:
    shown: list[str] = []
    with (tmp_path / "log").open("wb") as log:
        output = NativeOutput(shown.append, descriptor, log.fileno())
        for number in range(50):
            say(descriptor, f"echo {number}")
            output.take()
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


def test_a_character_in_two_pieces_is_one(tmp_path: Path, descriptor: int) -> None:
    shown: list[str] = []
    with (tmp_path / "log").open("wb") as log:
        output = NativeOutput(shown.append, descriptor, log.fileno())
        for piece in "ä\n".encode():
            os.write(descriptor, bytes([piece]))
            output.take()
    assert "".join(shown) == "ä\n"


@pytest.mark.long
def test_programs_and_cells_print_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    # Under pytest ipykernel leaves a process's file descriptors alone.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with Lab(num_ranks=2) as lab:
        capsys.readouterr()
        for _ in range(5):
            lab.run(
                "import os, sys\n"
                "print('a')\n"
                "_ = os.system('echo b')\n"
                "print('c', file=sys.stderr)\n"
                "_ = os.system('echo d')"
            )
            captured = capsys.readouterr()
            words = captured.out.replace("[ranks 0-1]", "").split()
            assert words == [*"abd"]
            assert captured.err.split() == ["[ranks", "0-1]", "c"]
        lab.run("os.close(1)\nprint('no descriptor')")
        lab.run("print('as before')")
        assert capsys.readouterr().out.count("[ranks 0-1]") == 2
