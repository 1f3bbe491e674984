"""Runs on disk: whole after any ending, loaded where no cluster is."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from kernels import running_kernel
from kernels import wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import labkit
from labkit import Lab
from labkit import Run
from labkit import checkpoint
from labkit.notebook.execution.completion import ENDED_ALONE
from labkit.notebook.execution.completion import end_lost_runs
from labkit.notebook.execution.errors import RankError
from labkit.notebook.history.collector import Collector
from labkit.notebook.kernel.pickled_function import source_of
from labkit.notebook.runs import catalog
from labkit.notebook.runs import persistence
from labkit.notebook.runs import run_files
from labkit.notebook.runs.comparison import compare_runs
from labkit.notebook.runs.comparison import plot_comparison
from labkit.rank.telemetry.journal import Journal
from labkit.records import NOTICED_LOSS
from labkit.records import RECORD
from labkit.records import Batch
from labkit.records import CellEnd
from labkit.records import Outcome

TRAIN = """
import torch.nn.functional as F
from labkit.data import digits
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
fit(model, digits(), F.cross_entropy, batch_size=512, epochs=2,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
"""
ENDLESS = "import itertools, time\nfor n in itertools.count():\n    log(n=n)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs of the test's own."""
    monkeypatch.setenv(persistence.FOLDER_VARIABLE, str(tmp_path / "runs"))
    return tmp_path / "runs"


def new_run(name: str = "run-1", strategy: str = "ddp", ranks: Sequence[int] = (0, 1)):
    run = Run(name, strategy, "the code", Collector(ranks))
    devices = ["cpu"] * len(ranks)
    persistence.begin(run, seed=3, devices=devices, backend="gloo", config=None)
    return run


def log(run: Run, rank: int, *logged: tuple[str, int, float]) -> None:
    """(metric, step, value) each."""
    names = list(dict.fromkeys(name for name, *_ in logged))
    rows = [(names.index(n), step, 0.1 * step, 7, v) for n, step, v in logged]
    sequence = run.collector.num_received[rank]
    run.collector.add(rank, Batch(sequence, names, np.array(rows, RECORD)))


def end(run: Run, state: str = "finished") -> None:
    sent = run.collector.num_received
    outcomes = [Outcome(rank, "ok", num_records=sent[rank]) for rank in sent]
    persistence.end(run, state, outcomes)


def assert_same(loaded: Run, run: Run) -> None:
    assert repr(loaded) == repr(run)
    assert loaded.status_line() == run.status_line()
    pd.testing.assert_frame_equal(loaded.history, run.history)
    pd.testing.assert_frame_equal(loaded.memory, run.memory)
    pd.testing.assert_frame_equal(loaded.comm, run.comm)
    pd.testing.assert_frame_equal(loaded.summary(), run.summary())
    pd.testing.assert_frame_equal(loaded.mean_loss(), run.mean_loss())
    assert loaded.theory == run.theory
    assert loaded.models == run.models
    assert loaded.mismatches == run.mismatches
    assert loaded.options == run.options
    assert loaded.log_scale == run.log_scale


# ---- a run's folder ----


def test_a_run_that_ended_is_loaded_as_it_was(lab: Lab, folder: Path) -> None:
    run = lab.train(
        "fsdp", TRAIN, name="mine", seed=3, accumulate=2, log_scale=True, live=False
    )
    loaded = labkit.load_run("mine")
    assert_same(loaded, run)
    assert len(loaded.memory) == 2
    assert loaded.state == "finished"
    assert loaded.code == run.code == TRAIN
    assert loaded.folder == run.folder
    assert loaded.info["seed"] == 3
    assert loaded.info["devices"] == ["cpu", "cpu"]
    assert set(loaded.info["versions"]) == {"python", "torch", "labkit", "deepspeed"}
    assert [each["status"] for each in loaded.info["outcomes"]] == ["ok", "ok"]
    assert loaded.not_on_disk == 0
    assert loaded.plot().axes
    [path] = folder.iterdir()
    assert sorted(each.name for each in path.iterdir()) == [
        "records.parquet",
        "run.json",
    ]
    assert json.loads((path / "run.json").read_text())["world_size"] == 2


def test_others_read_the_table_of_records(folder: Path) -> None:
    run = new_run(ranks=[0, 3])
    log(run, 0, ("b", 1, 0.5), ("a", 1, 0.25), ("b", 2, np.nan))
    log(run, 3, ("a", 9, -np.inf))
    end(run)
    table = pd.read_parquet(run.folder / "records.parquet")
    assert table["rank"].tolist() == [0, 0, 0, 3]
    assert table["metric"].tolist() == ["b", "a", "b", "a"]
    assert table["step"].tolist() == [1, 1, 2, 9]
    np.testing.assert_equal(table["value"].to_list(), [0.5, 0.25, np.nan, -np.inf])
    assert table["memory_bytes"].tolist() == [7] * 4


def test_records_go_to_the_table_and_back_unchanged(folder: Path) -> None:
    run = new_run(ranks=[0, 1, 2])
    values = np.random.default_rng(0).standard_normal(1000)
    log(run, 0, *((name, s, v) for s, v in enumerate(values) for name in "yx"))
    log(run, 1, (NOTICED_LOSS, 1, 0.5), ("x", 2**62, 5e-324))
    end(run)
    loaded = labkit.load_run("run-1")
    for rank in range(3):
        for metric in ("x", "y", "loss"):
            was = run.collector.series(rank, metric)
            now = loaded.collector.series(rank, metric)
            for field in ("step", "seconds", "memory_bytes", "value"):
                assert now[field].tobytes() == was[field].tobytes()
    assert_same(loaded, run)


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2, 3)])
def test_a_long_history_takes_its_memory_once(
    folder: Path, ranks: tuple[int, ...]
) -> None:
    """At the end of a run, and when it is loaded, less than a copy is made of it."""
    run = new_run(ranks=ranks)
    num_steps = 2**20 // len(ranks)
    records = np.zeros(num_steps, RECORD)
    records["step"] = np.arange(num_steps) + 1
    records["seconds"] = 0.1 * records["step"]
    total = records.nbytes * len(ranks)
    for rank in ranks:
        run.collector.add(rank, Batch(0, ["loss"], records))

    ended = extra_bytes(lambda: end(run))
    assert run.info["summary"]["steps_per_s"] == pytest.approx(10)
    shown = extra_bytes(lambda: (run.status_line(), run.summary()))
    found: list[Run] = []
    loaded = extra_bytes(lambda: found.append(labkit.load_run("run-1")))
    assert max(ended, shown) < total
    assert loaded < 2 * total
    for rank in ranks:
        assert np.array_equal(found[0].collector.records(rank), records)


def extra_bytes(do: Callable[[], object]) -> int:
    """What `do` takes at most in arrays, those of Arrow's pool too."""
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(default)


def test_a_run_without_records_is_loaded_as_well(folder: Path) -> None:
    run = new_run()
    end(run, "failed")
    assert_same(labkit.load_run("run-1"), run)


def test_what_json_cannot_hold_is_written_in_words() -> None:
    odd = {1: [float("nan"), np.float32(0.5), float("inf")], "f": len, "n": (None,)}
    assert run_files.plain(odd) == {
        "1": [None, 0.5, "inf"],
        "f": "<built-in function len>",
        "n": [None],
    }


def test_a_run_that_ended_with_a_very_long_error_is_read(folder: Path) -> None:
    run = new_run()
    long = "\ud800" * 2**24
    outcomes = [Outcome(rank, "error", "ValueError", long, long) for rank in (0, 1)]
    persistence.end(run, "failed", outcomes)
    loaded = labkit.load_run(run.name)
    assert loaded.state == "failed"
    assert loaded.info["outcomes"][1]["evalue"].startswith(long[:1000])


def test_what_nobody_could_read_is_not_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run("large", "ddp", "x" * 2**26, Collector([0]))
    persistence.begin(run, seed=3, devices=["cpu"], backend="gloo", config=None)
    assert run.folder is None
    said = capsys.readouterr().err
    assert "large is not kept on disk: 64 MiB of run.json, room for 32 MiB" in said


def test_the_source_of_a_function_is_kept(lab: Lab, folder: Path) -> None:
    def work() -> None:
        return None

    assert source_of(work) == "def work() -> None:\n    return None\n"
    assert source_of(functools.partial(work)) == source_of(work)
    assert source_of(len) == "len()"
    run = lab.train("raw", print, live=False)
    assert labkit.load_run(run.name).code == "print()"


def test_two_runs_of_a_name_have_two_folders(folder: Path) -> None:
    runs = [new_run("again") for _ in range(3)]
    for number, run in enumerate(runs):
        log(run, 0, ("number", 1, number))
        end(run)
    assert len({run.folder for run in runs}) == 3
    for number, run in enumerate(runs):
        loaded = labkit.load_run(run.folder.name)
        assert loaded.history["number"].tolist() == [number]
    assert labkit.load_run("again").folder == runs[-1].folder


def test_without_a_folder_a_run_continues_and_it_is_said_once(
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(persistence.FOLDER_VARIABLE, str(tmp_path / "file"))
    for _ in range(2):
        run = lab.train("raw", "log(x=1)", live=False)
        assert run.state == "finished"
        assert run.history["x"].tolist() == [1, 1]
        assert run.folder is None
    said = capsys.readouterr().err
    assert said.count("is not kept on disk: ") == 1
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    monkeypatch.setenv(persistence.FOLDER_VARIABLE, "runs")
    for name in ("one", "other"):  # each is said
        (tmp_path / name).mkdir()
        (tmp_path / name / "runs").touch()
        monkeypatch.chdir(tmp_path / name)
        new_run()
        assert "is not kept on disk: " in capsys.readouterr().err


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_what_is_kept_has_the_permissions_that_the_umask_gives(
    folder: Path, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        run = new_run()
        journal = Journal(run.folder, 0)
        journal.add_name("loss")
        journal.close()
        ended = new_run("ended")
        end(ended)
        checkpoint.save(tmp_path / "kept" / "first", {"w": torch.ones(2)}, {})
    finally:
        os.umask(before)
    kept = [*folder.rglob("*"), *(tmp_path / "kept").rglob("*")]
    assert {each.name for each in kept if each.is_file()} == {
        *("run.json", "rank-0.records", "rank-0.names", "records.parquet"),
        *("checkpoint.json", "rank-00000.safetensors"),
    }
    for each in (*kept, folder, tmp_path / "kept"):
        mode = 0o777 if each.is_dir() else 0o666
        assert each.stat().st_mode & 0o777 == mode & ~umask, each


# ---- nothing lost ----


def test_records_of_ranks_arrive_whole(lab: Lab, folder: Path) -> None:
    run = lab.train("raw", "for n in range(100_000): log(n=n)", live=False)
    for each in (run, labkit.load_run(run.name)):
        for rank in (0, 1):
            got = each.collector.series(rank, "n")["value"]
            np.testing.assert_array_equal(got, np.arange(100_000))
        assert each.collector.num_lost == 0


def test_records_of_a_rank_that_is_killed_are_there_up_to_the_kill(
    lab: Lab, folder: Path
) -> None:
    code = (
        "import os\nfor n in range(5000): log(n=n)\n"
        "if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()"
    )
    with pytest.raises(RankError, match="SIGKILL"):
        lab.train("raw", code, name="killed", live=False)
    for run in (lab.runs[-1], labkit.load_run("killed")):
        assert run.state == "failed"
        n = run.history.query("rank == 1")["n"]
        assert n.tolist() == list(range(5000))
        statuses = {each["rank"]: each["status"] for each in run.info["outcomes"]}
        assert statuses[1] == "died"
    lab.restart()


@pytest.mark.long
def test_a_run_is_read_by_others_while_it_runs_and_after_its_kernel_died(
    folder: Path,
) -> None:
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        kernel.run("%dist_start -n 2")
        code = ENDLESS + "    time.sleep(0.0005)"
        kernel.client.execute(f"%%dist_train raw --name endless --no-live\n{code}")
        wait_until(lambda: [*folder.glob("*/rank-1.names")] != [], 60, "it began")
        run = labkit.load_run("endless")
        assert run.state == "running"
        for goal in (100, 300, 500):
            wait_until(lambda n=goal: run.refresh().num_steps > n, 60, "it goes on")
        seen = run.num_steps
        assert 0 < run.elapsed() < 600
        listed = labkit.list_runs()
        assert listed.loc["endless", "state"] == "running"
        assert listed.loc["endless", "steps"] >= seen
        with pytest.raises(ValueError, match="endless is running; stop it before"):
            labkit.delete_runs("endless")
        kernel.process.send_signal(signal.SIGKILL)
        wait_until(lambda: run.refresh().state == "lost", 30, "it is lost")
    run = labkit.load_run("endless")
    assert run.state == "lost"
    assert run.num_steps >= seen
    assert run.elapsed() == run.seconds > 0
    for rank in (0, 1):
        n = run.collector.series(rank, "n")["value"]
        np.testing.assert_array_equal(n, np.arange(len(n)))
    assert labkit.list_runs(state="lost").index.tolist() == ["endless"]


LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({}, -1))"


def test_training_continues_when_a_ranks_disk_is_full(
    lab: Lab, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run(LIMIT.format(100_000), "1")
    try:
        run = lab.train("raw", "for n in range(500): log(n=n)", live=False)
    finally:
        lab.run(LIMIT.format(-1), "1")
    assert run.state == "finished"
    assert run.history["n"].tolist() == [n for n in range(500) for _ in (0, 1)]
    assert run.not_on_disk == 500
    assert capsys.readouterr().err == (
        "labkit: rank 1 had 500 of its 500 records in memory alone while it ran: "
        "File too large\n"
    )
    assert_same(labkit.load_run(run.name), run)


def test_records_that_never_came_are_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run()
    log(run, 0, ("x", 1, 1.0))
    outcomes = [Outcome(0, "ok", num_records=1), Outcome(1, "ok", num_records=1200)]
    persistence.end(run, "finished", outcomes)
    assert capsys.readouterr().err == (
        "labkit: 1,200 records of rank 1 are lost: they did not reach the notebook, "
        "and are not in the rank's journal on disk\n"
    )
    assert labkit.load_run("run-1").status_line().endswith("1200 records lost")


# ---- half-written ----


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"name": "x"}'])
def test_a_folder_without_a_whole_run_json_is_passed_over(
    folder: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    end(new_run("whole"))
    broken = folder / "20200101-000000-broken"
    broken.mkdir()
    if content is not None:
        (broken / "run.json").write_text(content)
    assert labkit.list_runs().index.tolist() == ["whole"]
    # A folder that has none is no run's, as that of the studies.
    assert ("passed over" in capsys.readouterr().err) == (content is not None)
    with pytest.raises(ValueError, match="there is no run 'broken' in"):
        labkit.load_run("broken")
    with pytest.raises(ValueError, match="has no run that can be read"):
        labkit.load_run(broken.name)


def test_a_table_that_was_not_put_in_place_is_not_read(folder: Path) -> None:
    run = new_run()
    (run.folder / "records.parquet.123").write_bytes(b"PAR1 half")
    assert labkit.load_run("run-1").history.empty


def test_a_run_that_was_read_from_disk_cannot_be_stopped(folder: Path) -> None:
    run = new_run()
    loaded = labkit.load_run("run-1")
    for use in (loaded.stop, loaded.interrupt, loaded.wait):
        with pytest.raises(RuntimeError, match="run-1 was read from disk"):
            use()
    persistence.end(run, "finished", [])
    loaded.stop()
    assert loaded.wait().state == "finished"


def test_a_run_of_a_kernel_that_is_gone_is_lost(folder: Path) -> None:
    run = new_run()
    assert labkit.load_run("run-1").state == "running"
    for change in (
        {"pid_created": run.info["pid_created"] - 60},  # another process's pid
        {"pid": 2**22 + 1},  # more than there can be
    ):
        info = persistence.run_info(run) | change
        run_files.write_info(run.folder, info)
        assert labkit.load_run("run-1").state == "lost"
    run_files.write_info(run.folder, info | {"host": "elsewhere"})
    assert labkit.load_run("run-1").state == "running"


def test_a_lost_run_ends_as_all_of_its_ranks_say(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = new_run()
    outcomes = {2: Outcome(2, "ok"), 3: Outcome(3, "ok")}  # of a part of a lab
    ends = {
        rank: CellEnd(7, 0.0, o, None, f"{run.folder}") for rank, o in outcomes.items()
    }
    end_lost_runs(ends)
    assert labkit.load_run("run-1").state == "running"  # in this process
    run_files.write_info(run.folder, persistence.run_info(run) | {"pid": 2**22 + 1})
    end_lost_runs({2: ends[2]})  # rank 1 has died
    assert labkit.load_run("run-1").state == "lost"
    since_restart = f"{run_files.journal_folder(run.folder, 1)}"
    failed = replace(ends[3], outcome=Outcome(3, "error", "OSError"))
    told = {2: ends[2], 3: failed}
    end_lost_runs({rank: replace(e, folder=since_restart) for rank, e in told.items()})
    loaded = labkit.load_run("run-1")
    assert (loaded.state, loaded.notes) == ("failed", [ENDED_ALONE])
    assert [each["rank"] for each in loaded.info["outcomes"]] == [0, 1]
    end_lost_runs(ends)  # it has ended by now
    assert labkit.load_run("run-1").state == "failed"
    labkit.delete_runs("run-1")
    end_lost_runs(ends)
    assert capfd.readouterr().err == ""


# ---- many runs ----


def test_runs_are_listed_newest_last(folder: Path) -> None:
    assert labkit.list_runs().empty
    for name, strategy, state in [
        ("a", "ddp", "finished"),
        ("b", "fsdp", "failed"),
        ("c", "ddp", "failed"),
    ]:
        run = new_run(name, strategy)
        log(run, 0, ("loss", 5, 0.25))
        end(run, state)
    table = labkit.list_runs()
    assert table.index.tolist() == ["a", "b", "c"]
    assert table["last_loss"].tolist() == [0.25] * 3
    assert table["steps"].tolist() == [5] * 3
    assert table["when"].dtype.kind == "M"
    assert labkit.list_runs(strategy="ddp").index.tolist() == ["a", "c"]
    assert labkit.list_runs(state="failed", last=1).index.tolist() == ["c"]
    assert labkit.list_runs(own=[run]).index.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="last is 0"):
        labkit.list_runs(last=0)


def test_runs_of_one_name_are_listed_and_compared_by_folder(folder: Path) -> None:
    begun = [new_run("again") for _ in range(2)]
    for run in begun:
        log(run, 0, ("loss", 1, 1.0))
        end(run)
    folders = [run.folder.name for run in begun if run.folder is not None]
    listed = labkit.list_runs().index.tolist()
    assert listed == [folders[0], "again"]
    found = [labkit.load_run(name) for name in listed]
    assert [run.folder for run in found] == [run.folder for run in begun]
    # By its name a lab finds its own run before those on disk.
    own = labkit.list_runs(own=begun[:1]).index.tolist()
    assert own == ["again", folders[1]]
    assert compare_runs(found).index.tolist() == folders
    assert compare_runs(found[:1]).index.tolist() == ["again"]
    legend = plot_comparison(found).axes[2].get_legend()
    assert legend is not None
    for each in legend.get_texts():
        assert re.fullmatch(r"\d\d:\d\d:\d\d again", each.get_text())


def test_a_run_that_has_ended_is_summarized_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [new_run(f"run-{number}") for number in range(3)]
    for run in runs[:2]:
        log(run, 0, ("loss", 5, 0.25))
        end(run)
    on_disk = labkit.list_runs()
    asked: list[Run] = []
    summarize = persistence.summarize
    monkeypatch.setattr(
        catalog, "summarize", lambda run: asked.append(run) or summarize(run)
    )
    listed = labkit.list_runs(own=runs)
    assert asked == [runs[2]]
    columns = ["steps", "last_loss", "seconds", "state"]
    pd.testing.assert_frame_equal(listed[columns][:2], on_disk[columns][:2])


def test_runs_of_the_session_are_listed_without_their_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a list of 200 takes no longer than one of 200 runs that are read from disk."""
    runs = [new_run(f"run-{number}") for number in range(3)]
    for run in runs:
        log(run, 0, ("loss", 5, 0.25))
        end(run)
    read: list[Path] = []
    read_info = run_files.read_info
    monkeypatch.setattr(
        run_files, "read_info", lambda path: read.append(path) or read_info(path)
    )
    assert list(labkit.list_runs(own=runs[:2]).index) == ["run-0", "run-1", "run-2"]
    assert read == [runs[2].folder]


def test_runs_are_deleted_by_name_or_folder_and_none_by_mistake(folder: Path) -> None:
    runs = [new_run(name) for name in ("a", "b", "b")]
    for run in runs:
        end(run)
    for names, message in [
        (["a", "nothing"], "there is no run 'nothing' in .*; there are: a, b"),
        (["a", "b"], "2 runs are called b; name their folders: "),
        (["a", "../runs"], "there is no run '../runs'"),
    ]:
        with pytest.raises(ValueError, match=message):
            labkit.delete_runs(*names)
    assert len(labkit.list_runs()) == 3
    assert labkit.delete_runs("a", runs[1].folder.name) == [
        runs[0].folder,
        runs[1].folder,
    ]
    assert [*folder.iterdir()] == [runs[2].folder]


def test_a_lab_finds_its_own_runs_before_those_on_disk(lab: Lab, folder: Path) -> None:
    end(new_run("old", "fsdp"))
    mine = lab.train("raw", "log(x=1)", name="found", live=False)
    end(new_run("found"))
    assert lab.find_runs(["old", "found"])[1] is mine
    assert lab.compare("old", "found")["strategy"].tolist() == ["fsdp", "raw"]
    with pytest.raises(ValueError, match=r"no run 'none' in .*; of this lab: .*found"):
        lab.find_runs(["none"])


def test_a_run_is_loaded_without_torch_or_a_cluster(folder: Path) -> None:
    run = new_run()
    log(run, 0, ("loss", 1, 0.5))
    end(run)
    code = (
        "import sys, labkit\nrun = labkit.load_run('run-1')\n"
        "print(run, run.summary().shape, run.theory, len(run.history))\n"
        "print(labkit.list_runs().shape)\n"
        "print({'torch', 'ipyparallel', 'IPython', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == (
        "<Run 'run-1': ddp on 2 ranks, finished, 1 step> (2, 7) {} 1\n(1, 10)\nset()\n"
    ), done.stderr


def test_runs_go_to_the_working_directory_unless_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(persistence.FOLDER_VARIABLE)
    monkeypatch.chdir(tmp_path)
    run = new_run()
    end(run)
    assert run.folder.parent == tmp_path / "runs"
    monkeypatch.chdir("/")
    assert labkit.load_run("run-1", tmp_path / "runs").folder == run.folder


@pytest.mark.long
def test_where_the_working_directory_has_been_deleted_it_is_said(
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(persistence, "_warned", set())
    monkeypatch.delenv(persistence.FOLDER_VARIABLE)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for _ in range(2):
        run = lab.train("ddp", TRAIN, live=False)
        assert (run.state, run.folder) == ("finished", None)
    said = capsys.readouterr().err
    assert said.count("the working directory has been deleted; change to another") == 1
    for do in (
        labkit.list_runs,
        lambda: labkit.load_run("run-1"),
        lambda: labkit.load_run("run-1", "elsewhere"),
        lambda: lab.train("ddp", TRAIN, checkpoint="kept", live=False),
    ):
        with pytest.raises(RuntimeError, match="the working directory has been del"):
            do()
    with pytest.raises(RankError, match="not a file"):
        lab.run("from labkit.data import text; text('missing')")
    assert labkit.list_runs(tmp_path).empty
    with pytest.raises(RuntimeError, match="the working directory has been deleted"):
        Lab(num_ranks=1)


# ---- other programs ----


def events(folder: Path, tag: str) -> list[tuple[int, float, float]]:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(e.step, e.wall_time, e.value) for e in accumulator.Scalars(tag)]


def test_tensorboard_reads_what_was_written_for_it(
    folder: Path, tmp_path: Path
) -> None:
    run = new_run()
    log(run, 0, ("loss", 1, 0.5), ("lr", 1, 0.125), ("loss", 2, 0.25))
    log(run, 1, ("loss", 1, 8.0))
    end(run)
    labkit.load_run("run-1").to_tensorboard(tmp_path / "events")
    began = run.info["began"]
    at = [pytest.approx(began + 0.1 * step, abs=1e-3) for step in (0, 1, 2)]
    first, second = tmp_path / "events" / "rank-0", tmp_path / "events" / "rank-1"
    assert events(first, "loss") == [(1, at[1], 0.5), (2, at[2], 0.25)]
    assert events(first, "lr") == [(1, at[1], 0.125)]
    assert events(first, "memory_bytes") == [(1, at[1], 7.0), (2, at[2], 7.0)]
    assert events(second, "loss") == [(1, at[1], 8.0)]


def test_without_tensorboard_it_is_said_how_to_install_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(RuntimeError, match=r'pip install "labkit\[tensorboard\]"'):
        run.to_tensorboard(tmp_path / "events")
    assert not (tmp_path / "events").exists()
