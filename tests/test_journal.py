"""A rank's records in a file: whole whatever happens to the rank or the disk."""

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from labkit.notebook.history.collector import Collector
from labkit.notebook.runs import run_files
from labkit.rank.telemetry import journal as journal_module
from labkit.rank.telemetry.emitter import Emitter
from labkit.rank.telemetry.journal import CHUNK_RECORDS
from labkit.rank.telemetry.journal import Journal
from labkit.records import NAMES_FILE
from labkit.records import RECORD
from labkit.records import RECORDS_FILE
from labkit.records import UNREAD
from labkit.records import Batch

TOO_MANY = CHUNK_RECORDS + 100


def write(journal: Journal, num_records: int, name: str = "loss") -> None:
    metric = journal.add_name(name)
    for k in range(journal.num_records, journal.num_records + num_records):
        journal.append(metric, k, k / 2, 100 * k, 1 / (k + 1))


def read(folder: Path, *, is_growing: bool = False) -> Collector:
    collector = Collector([0])
    run_files.read_records(folder, collector, is_growing=is_growing)
    return collector


def steps(folder: Path, *, is_growing: bool = False) -> list[int]:
    return read(folder, is_growing=is_growing).records(0)["step"].tolist()


# ---- writing and reading ----


def test_what_was_appended_is_in_the_file_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    write(journal, 3)
    write(journal, 2, name="two words,\nand a line")
    collector = read(tmp_path)
    assert collector.records(0)["step"].tolist() == [0, 1, 2, 3, 4]
    assert collector.records(0)["seconds"].tolist() == [0, 0.5, 1, 1.5, 2]
    assert collector.records(0)["memory_bytes"].tolist() == [0, 100, 200, 300, 400]
    assert collector.series(0, "loss")["value"].tolist() == [1, 1 / 2, 1 / 3]
    assert len(collector.series(0, "two words,\nand a line")) == 2
    assert journal.num_not_on_disk == 0


def test_a_reader_takes_in_what_was_appended_since(tmp_path: Path) -> None:
    journal, collector = Journal(tmp_path, 0), Collector([0])
    for num_records in (0, 5, CHUNK_RECORDS, 7):
        write(journal, num_records)
        run_files.read_records(tmp_path, collector, is_growing=True)
        assert collector.num_records[0] == journal.num_records
    assert collector.num_lost == 0
    whole = collector.records(0)["step"]
    np.testing.assert_array_equal(whole, np.arange(CHUNK_RECORDS + 12))


@pytest.mark.parametrize("folder", [None, "disk"])
def test_what_is_taken_is_what_was_appended(folder: str | None, tmp_path: Path) -> None:
    journal = Journal(folder and tmp_path, 0)
    taken = []
    for num_records in (1, 3 * CHUNK_RECORDS, CHUNK_RECORDS - 1, 2):
        write(journal, num_records)
        taken.append(journal.take(journal.num_records))
        assert len(taken[-1]) == num_records
        assert len(journal._chunks) <= 1, "what was taken is let go"
    whole = np.concatenate(taken)
    np.testing.assert_array_equal(whole["step"], np.arange(4 * CHUNK_RECORDS + 2))


def test_a_journal_without_a_folder_has_no_error() -> None:
    journal = Journal()
    write(journal, 3)
    assert (journal.error, journal.num_not_on_disk) == ("", 3)


def test_there_may_be_no_more_metrics_than_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "MAX_METRICS", 3)
    journal = Journal()
    assert [journal.add_name(name) for name in "abca"] == [1, 2, 3, 1]
    with pytest.raises(ValueError, match=r"log\(d=\.\.\.\): a run has at most 3"):
        journal.add_name("d")


# ---- what a rank has yet to fill in ----


def test_a_reader_waits_for_values_while_the_rank_lives(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    metric = journal.add_name("loss")
    for step, value in enumerate([0.5, UNREAD, float("nan"), UNREAD]):
        journal.append(metric, step, 0.0, 0, value)
    assert steps(tmp_path, is_growing=True) == [0]
    journal.fill(1, 0.25)
    collector = read(tmp_path, is_growing=True)
    np.testing.assert_equal(collector.records(0)["value"], [0.5, 0.25, np.nan])
    # Of a rank that is gone there is nothing to wait for.
    assert steps(tmp_path) == [0, 1, 2, 3]


# ---- half-written files ----


@pytest.mark.parametrize("cut", [1, 2, 33, 34, 35])
def test_a_file_that_was_cut_is_read_up_to_there(tmp_path: Path, cut: int) -> None:
    write(Journal(tmp_path, 0), 5)
    path = tmp_path / RECORDS_FILE.format(0)
    os.truncate(path, 5 * RECORD.itemsize - cut)
    assert steps(tmp_path) == list(range(4 if cut <= 34 else 3))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 100,
        struct.pack("<Hqdqd", 9, 1, 1.0, 1, 1.0),  # an id that has no name
        struct.pack("<Hqdqd", 1, 1, float("nan"), 1, 1.0),
    ],
)
def test_garbage_ends_a_file_of_records(tmp_path: Path, garbage: bytes) -> None:
    write(Journal(tmp_path, 0), 5)
    with (tmp_path / RECORDS_FILE.format(0)).open("r+b") as file:
        file.seek(3 * RECORD.itemsize)
        file.write(garbage)
    assert steps(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("tail", [b'[2, "accu', b"\xff\xfe\n", b"[7, 1]\n", b"5\n"])
def test_garbage_ends_a_file_of_names(tmp_path: Path, tail: bytes) -> None:
    journal = Journal(tmp_path, 0)
    write(journal, 3)
    write(journal, 2, name="accuracy")
    path = tmp_path / NAMES_FILE.format(0)
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(first + tail)
    collector = read(tmp_path)
    assert collector.records(0)["step"].tolist() == [0, 1, 2]
    assert len(collector.series(0, "loss")) == 3


def test_an_id_that_was_given_twice_is_the_later_ones(tmp_path: Path) -> None:
    # As when an interrupt came after the first line.
    write(Journal(tmp_path, 0), 2)
    lines = [json.dumps([1, "lost"]), json.dumps([1, "loss"])]
    (tmp_path / NAMES_FILE.format(0)).write_text("\n".join(lines) + "\n")
    assert read(tmp_path).series(0, "loss")["step"].tolist() == [0, 1]


@pytest.mark.parametrize("name", [RECORDS_FILE, NAMES_FILE])
def test_a_file_that_is_missing_gives_no_records(tmp_path: Path, name: str) -> None:
    write(Journal(tmp_path, 0), 2)
    (tmp_path / name.format(0)).unlink()
    assert steps(tmp_path) == []


# ---- a rank that dies, a disk that is full ----


def in_a_process(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    code = (
        "import os, resource, sys\n"
        "from labkit.rank.telemetry.journal import CHUNK_RECORDS, Journal\n"
        f"folder = {str(folder)!r}\n{code}"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )


def test_records_survive_a_sigkill_right_after_them(tmp_path: Path) -> None:
    done = in_a_process(
        "journal = Journal(folder)\n"
        "metric = journal.add_name('loss')\n"
        "for step in range(100_000):\n"
        "    journal.append(metric, step, 0.0, 0, step)\n"
        "os.kill(os.getpid(), 9)\n",
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL
    assert steps(tmp_path) == list(range(100_000))


def test_a_full_disk_leaves_training_to_continue(tmp_path: Path) -> None:
    """Here a limit on a file's size; to the journal it is as a disk that is full."""
    done = in_a_process(
        "limit = int(1.5 * 34 * CHUNK_RECORDS)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "journal = Journal(folder)\n"
        "metric = journal.add_name('loss')\n"
        f"for step in range({TOO_MANY}):\n"
        "    journal.append(metric, step, 0.0, 0, step)\n"
        "taken = journal.take(journal.num_records)['step'].tolist()\n"
        f"assert taken == list(range({TOO_MANY}))\n"
        "journal.close()\n"
        "print(journal.num_not_on_disk, journal.error)\n",
        tmp_path,
    )
    assert done.stderr == ""
    assert done.stdout == f"{TOO_MANY - CHUNK_RECORDS} File too large\n"
    assert steps(tmp_path) == list(range(CHUNK_RECORDS))


def test_a_folder_that_is_not_there_leaves_training_to_continue(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "nothing", 0)
    write(journal, 3)
    assert journal.error == "No such file or directory"
    assert journal.num_not_on_disk == 3
    assert journal.take(3)["step"].tolist() == [0, 1, 2]


# ---- with the emitter ----


def test_a_forked_worker_does_not_write_into_its_parents_journal(
    tmp_path: Path,
) -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, journal=Journal(tmp_path, 0), interval_s=1e6)
    emitter.put("loss", 1.0, 1, 0)
    pid = os.fork()
    if pid == 0:
        emitter.put("loss", 2.0, 2, 0)
        os._exit(0)
    os.waitpid(pid, 0)
    emitter.put("loss", 3.0, 3, 0)
    emitter.close()
    assert batches[0].records["step"].tolist() == [1, 3]
    assert steps(tmp_path) == [1, 3]


def test_a_thread_that_outlives_its_cell_logs_into_nothing(tmp_path: Path) -> None:
    batches: list[Batch] = []
    emitter = Emitter(batches.append, journal=Journal(tmp_path, 0), interval_s=1e6)
    emitter.put("loss", 1.0, 1, 0)
    emitter.close()
    emitter.put("loss", 2.0, 2, 0)
    assert emitter.journal.num_records == 1
    assert steps(tmp_path) == [1]
