"""What was printed last by a process that then died."""

import resource
from pathlib import Path

import pytest

from labkit.unsent import SIZE
from labkit.unsent import Tail
from labkit.unsent import shared_pages
from labkit.unsent import unsent_output


@pytest.mark.parametrize("num_before", [0, 1, SIZE - 3, SIZE, 5 * SIZE + 7])
def test_what_was_not_sent_is_found_wherever_it_lies(
    tmp_path: Path, num_before: int
) -> None:
    tail = Tail(shared_pages(tmp_path / "unsent"), "stderr")
    tail.add("x" * num_before)
    tail.note_sent(tail.num_written)
    assert unsent_output(tmp_path / "unsent") == {}
    tail.add("\u00fcber ")
    tail.add("\u6700\u5f8c\n")
    assert unsent_output(tmp_path / "unsent") == {"stderr": "\u00fcber \u6700\u5f8c\n"}


def test_each_stream_has_its_own(tmp_path: Path) -> None:
    pages = shared_pages(tmp_path / "unsent")
    out, err = Tail(pages, "stdout"), Tail(pages, "stderr")
    out.add("one\n")
    err.add("other \udcff\n")
    found = unsent_output(tmp_path / "unsent")
    assert found == {"stdout": "one\n", "stderr": "other \ufffd\ufffd\ufffd\n"}
    out.note_sent(out.num_written)
    assert [*unsent_output(tmp_path / "unsent")] == ["stderr"]


def test_a_line_says_how_much_is_lost(tmp_path: Path) -> None:
    tail = Tail(shared_pages(tmp_path / "unsent"), "stdout")
    for number in range(SIZE):
        tail.add(f"{number:07}\n")
    found = unsent_output(tmp_path / "unsent")["stdout"]
    first, *lines = found.splitlines()
    assert first == f"(labkit: {7 * SIZE:,} bytes before this are lost)"
    assert lines == [f"{number:07}" for number in range(SIZE - SIZE // 8, SIZE)]


def test_counts_that_a_kill_has_torn_show_nothing(tmp_path: Path) -> None:
    tail = Tail(shared_pages(tmp_path / "unsent"), "stdout")
    tail.add("sent already\n")
    tail.note_sent(tail.num_written + 5)
    assert unsent_output(tmp_path / "unsent") == {}


def test_a_disk_that_is_nearly_full_is_an_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, limits[1]))
    try:
        with pytest.raises(OSError, match="full"):
            shared_pages(tmp_path / "unsent")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_is_missing_or_was_cut_off_has_none(tmp_path: Path) -> None:
    assert unsent_output(tmp_path / "none") == {}
    (tmp_path / "cut").write_bytes(b"\x01" * 100)
    assert unsent_output(tmp_path / "cut") == {}
