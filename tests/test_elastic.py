"""Ranks killed in a run with --elastic: it resumes as if nothing had happened."""

import os
import signal
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from marks import long_but

from labkit import Lab
from labkit import RankError
from labkit import Run
from labkit import load_run
from labkit.notebook.cluster.rank_group import RankGroup
from labkit.notebook.execution import elastic
from labkit.notebook.history.collector import Collector
from labkit.notebook.live.widget_frames import FrameEncoder
from labkit.notebook.runs import run_files
from labkit.rank.telemetry.journal import Journal
from labkit.records import CHECKPOINT
from labkit.step_folders import all_in

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.timeout(180)

# 4 steps an epoch.
LOOP = """
import os, signal, time
from pathlib import Path
import torch.nn.functional as F
from torch.utils.data import TensorDataset

def until_saved(step):
    # A checkpoint is written while the next steps are taken.
    is_there = Path({folder!r}, "kept", f"step-{{step:08d}}").exists
    deadline = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < deadline, f"no checkpoint of step {{step}}"
        time.sleep(0.01)
    return True

def die_once(here, name):
    flag = Path({folder!r}, name)
    if here and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)

x = torch.randn(46, 8)
data = TensorDataset(x, x.sum(1).long() % 3)
model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Dropout(0.2))
adam = torch.optim.AdamW(model.parameters(), lr=0.02)
model, optimizer, loader = prepare(model, adam, data, batch_size=12)
rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
for epoch in range(4):
    total = seen = 0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        seen += 1
        {death}
    print(loss.item(), total / seen)
    rate.step()
    log(epochs_done=epoch + 1)
"""


@pytest.fixture
def cell(tmp_path: Path) -> Callable[[str], str]:
    return lambda death: LOOP.format(folder=str(tmp_path), death=death)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"checkpoint": tmp_path / "kept", "elastic": True, "live": False}


def rows(run: Run) -> pd.DataFrame:
    table = run.history.drop(columns=["memory_bytes", "seconds"])
    return table.set_index(["rank", "step"]).sort_index()


@pytest.mark.parametrize("strategy", long_but(["fsdp", "zero3"], "fsdp"))
def test_a_run_survives_the_death_of_one_rank_and_then_of_another(
    lab: Lab,
    strategy: str,
    cell: Callable[[str], str],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    whole = lab.train(strategy, cell("pass"), live=False)
    weights = lab.pull("model", full=True)
    pids = dict(lab.status()["pid"])
    # The first before there is a checkpoint, the second between two of them.
    deaths = """
        die_once(rank == 1 and epoch == 0, "first")
        die_once(
            rank == 0 and epoch == 2 and len(y) < 6 and until_saved(9), "second"
        )"""
    run = lab.train(strategy, cell(deaths), every=3, **options)

    assert run.state == "finished"
    assert [(each.step, each.ranks) for each in run.restarts] == [(0, [1]), (9, [0])]
    assert "SIGKILL" in run.restarts[0].cause
    said = capsys.readouterr().err
    assert "killed by SIGKILL" in said.splitlines()[0]
    assert "; bringing it back" in said.splitlines()[0]
    assert "labkit: rank 1 died; resumed from step 0" in said
    assert "labkit: rank 0 died; resumed from step 9" in said
    assert "2 restarts" in run.status_line()
    assert all(lab.status()["pid"] != pd.Series(pids))
    found = lab.pull("model", full=True)
    for name, value in weights.items():
        assert (found[name] == value).all(), name
    for known in (run, load_run(run.name)):
        pd.testing.assert_frame_equal(
            rows(known), rows(whole), check_exact=True, check_like=True
        )
        assert known.restarts == run.restarts
        by_rank = [
            group["seconds"].diff() for _, group in known.history.groupby("rank")
        ]
        assert all((seconds[1:] > 0).all() for seconds in by_rank)
    assert sorted(path.name for path in run.folder.iterdir()) == [  # type: ignore[union-attr]
        "records.parquet",
        "run.json",
    ]
    died_at = [restart.died_at for restart in run.restarts]
    steps = [line.get_xdata() for line in run.plot().axes[0].lines]
    marked = [step[0] for step in steps if len(step) == 2 and step[0] == step[1]]
    assert sorted(marked) == sorted([0, 9, *died_at])
    [legend] = [axes.get_legend() for axes in run.plot().axes if axes.get_legend()]
    assert [text.get_text() for text in legend.get_texts()][-4:] == [
        "rank 1 died",
        "resumed from\nstep 0",
        "rank 0 died",
        "resumed from\nstep 9",
    ]


DEEP = """torch.nn.Sequential(
    torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Dropout(0.2),
    torch.nn.Linear(12, 12), torch.nn.ReLU(), torch.nn.Dropout(0.2),
    torch.nn.Linear(12, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3),
)"""


def in_parts(code: str) -> str:
    """The loop with a model of four layers, which counts steps and looks at the model
    between epochs."""
    layers = "torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Dropout(0.2))"
    assert layers in code
    code = code.replace("for x, y in loader", "for step, (x, y) in enumerate(loader)")
    return code.replace(layers, DEEP) + (
        "    with torch.no_grad():\n"
        "        model(x)\n"
        "        log(noise=float(torch.rand(())))\n"
    )


def by_fit(code: str) -> str:
    """As `fit` does it: what the loop does after a step is a hook of the optimizer."""
    begin, loop = code.split("model, optimizer, loader = ")
    [_, rest] = loop.split("seen += 1\n", 1)
    death = rest.split("    print(")[0].strip()
    return (
        begin
        + f"""
num_steps = 0
def after_step(*_):
    global num_steps
    epoch, step = divmod(num_steps, 4)
    num_steps += 1
    {death}
adam.register_step_post_hook(after_step)
fit(model, data, F.cross_entropy, optimizer=adam, batch_size=12, epochs=4,
    validate=data)
"""
    )


IN_PARTS: dict[str, dict[str, Any]] = {
    "pipeline": {},
    "pipeline by fit": {"microbatches": 2},
    "pipeline by fit, interleaved": {"schedule": "interleaved", "microbatches": 4},
    "tensor": {},
    "tensor by fit": {},
    "parameter_server": {},
    "parameter_server by fit": {},
}
IN_GRIDS: dict[str, dict[str, Any]] = {
    "pipeline, pp=4": {"mesh": "pp=4"},
    "pipeline, dp=2,pp=2": {"mesh": "dp=2,pp=2"},
    "pipeline by fit, dp=2,pp=2": {"mesh": "dp=2,pp=2", "microbatches": 2},
    "tensor, dp=2,tp=2": {"mesh": "dp=2,tp=2"},
    "parameter_server, two of each": {"servers": 2},
}


@pytest.fixture(scope="module")
def lab_of_4() -> Iterator[Lab]:
    with Lab(num_ranks=4, group_timeout_s=30) as lab:
        yield lab


@pytest.mark.parametrize("case", IN_PARTS)
@pytest.mark.long
def test_a_model_in_parts_resumes_as_if_nothing_had_happened(
    lab: Lab, case: str, cell: Callable[[str], str], options: dict[str, Any]
) -> None:
    outlives_a_death(lab, case, IN_PARTS[case], cell, options)


@pytest.mark.release
@pytest.mark.parametrize("case", IN_GRIDS)
def test_a_grid_of_ranks_resumes_as_if_nothing_had_happened(
    lab_of_4: Lab, case: str, cell: Callable[[str], str], options: dict[str, Any]
) -> None:
    lab_of_4.restart()
    outlives_a_death(lab_of_4, case, IN_GRIDS[case], cell, options)


def outlives_a_death(
    lab: Lab,
    case: str,
    more: dict[str, Any],
    cell: Callable[[str], str],
    options: dict[str, Any],
) -> None:
    """A run in which a rank is killed between two checkpoints ends with the losses and
    weights of one that nothing has disturbed."""
    strategy = case.replace(",", " ").split()[0]
    # The last of the ranks that run the cell.
    here = "rank == world_size - 1 and epoch == 2 and step == 3 and until_saved(9)"
    codes = [in_parts(cell(each)) for each in ("pass", f"die_once({here}, 'gone')")]
    if "by fit" in case:
        codes = [by_fit(each) for each in codes]
    whole = lab.train(strategy, codes[0], live=False, **more)
    weights = lab.pull("model", full=True)
    run = lab.train(strategy, codes[1], every=3, **more, **options)
    last = whole.history["rank"].max()
    assert [(each.step, each.ranks) for each in run.restarts] == [(9, [last])]
    pd.testing.assert_frame_equal(
        rows(run), rows(whole), check_exact=True, check_like=True
    )
    found = lab.pull("model", full=True)
    for name, value in weights.items():
        assert (found[name] == value).all(), name


def write_steps(journal: Journal, steps: range, *, every: int, offset: float) -> None:
    """What a rank writes of these steps, with a checkpoint after some of them."""
    for step in steps:
        for name, value in (("loss", offset + step), ("samples", 4.0)):
            metric = journal.add_name(name)
            journal.append(metric, step, 0.1 * step, 7, value)
        if step % every == 0:
            journal.append(journal.add_name(CHECKPOINT), step, 0.1 * step, 7, step)
            # At the end of an epoch, after the checkpoint of its last step.
            journal.append(journal.add_name("val_loss"), step, 0.1 * step, 7, offset)


def test_another_kernel_reads_a_run_that_is_restarted_as_it_goes(
    tmp_path: Path,
) -> None:
    reader, late = Collector([0]), Collector([0])
    frames = FrameEncoder(reader)
    journal = Journal(tmp_path)
    write_steps(journal, range(1, 6), every=3, offset=0.0)
    run_files.read_records(tmp_path, reader, is_growing=True)
    frames.delta()
    frames.keyframe()
    write_steps(journal, range(6, 9), every=3, offset=0.0)
    # It resumes from step 3, on a rank that gives its metrics other numbers.
    folder = run_files.journal_folder(tmp_path, 1)
    folder.mkdir()
    again = Journal(folder)
    again.add_name("val_loss")
    write_steps(again, range(4, 8), every=100, offset=100.0)
    for collector in (reader, late):
        run_files.read_records(
            tmp_path, collector, restarts=[(3, 50.0)], is_growing=collector is reader
        )
        history = collector.history()
        assert list(history["step"]) == [1, 2, 3, 4, 5, 6, 7]
        assert list(history["loss"]) == [1, 2, 3, 104, 105, 106, 107]
        assert list(history["seconds"].round(1)) == [
            0.1,
            0.2,
            0.3,
            50.4,
            50.5,
            50.6,
            50.7,
        ]
        assert "val_loss" not in history.dropna(axis=1, how="all")
        assert collector.steps == {0: 7}
        assert collector.num_lost == 0
    assert frames.delta() is None  # curves that go back need a keyframe
    header, _ = frames.keyframe()
    assert [0, "loss", 7] in header["series"]
    run_files.write_records(tmp_path, reader)
    assert [path.name for path in tmp_path.iterdir()] == ["records.parquet"]
    run_files.read_records(tmp_path, late, restarts=[(3, 50.0)], is_growing=False)
    pd.testing.assert_frame_equal(late.history(), reader.history(), check_like=True)


@pytest.mark.long
def test_what_cannot_continue_fails_with_the_cause(
    lab: Lab,
    cell: Callable[[str], str],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A rank that dies at the same place each time.
    monkeypatch.setattr(elastic, "MAX_RESTARTS", 1)
    death = """
        if rank == 1 and epoch == 1 and until_saved(3):
            os.kill(os.getpid(), signal.SIGSEGV)"""
    with pytest.raises(RankError, match=r"SIGSEGV.* resumed 1 time from step 3 "):
        lab.train("ddp", cell(death), every=3, **options)
    assert lab.runs[-1].state == "failed"
    assert [each.step for each in lab.runs[-1].restarts] == [3]
    assert list(lab.restart()) == [1]
    # A cell that needs what another one made, on a rank that is new.
    lab.run("learned_before = 1")
    again = "learned_before\n        die_once(rank == 0 and epoch == 2, 'gone')"
    told = r"NameError: .*rank 0 died and was restarted"
    with pytest.raises(RankError, match=told) as caught:
        lab.train("ddp", cell(again), every=3, **{**options, "resume": True})
    shown = "\n".join(caught.value._render_traceback_())
    assert "rank 0 died and was restarted with nothing but this cell" in shown
    assert lab.pull("learned_before", 1) == 1


@pytest.mark.parametrize("ends_by", ["--timeout", "an interrupt"])
def test_what_ends_a_run_while_ranks_come_back_is_heard(
    lab: Lab,
    cell: Callable[[str], str],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    ends_by: str,
) -> None:
    bring_back = RankGroup.bring_back

    def end_meanwhile(group: RankGroup, ranks: list[int]) -> list[int]:
        if ends_by == "an interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            assert lab.runs[-1].execution
            lab.runs[-1].execution.stop_policy.deadline = time.monotonic()
        return bring_back(group, ranks)

    said = "longer than 90 seconds" if ends_by == "--timeout" else "Interrupted"
    death = "die_once(rank == 1 and epoch == 1, 'gone')"
    with monkeypatch.context() as patch:
        patch.setattr(RankGroup, "bring_back", end_meanwhile)
        with pytest.raises((TimeoutError, KeyboardInterrupt), match=said):
            lab.train("ddp", cell(death), timeout=90, **options)
    run = lab.runs[-1]
    assert run.state == "interrupted"
    assert [each.ranks for each in run.restarts] == [[1]]
    lab.run("dist.barrier()")
    assert lab.restart() == []


@pytest.mark.long
def test_a_run_that_is_stopped_while_ranks_come_back_ends_there(
    lab: Lab,
    cell: Callable[[str], str],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun, bring_back = threading.Event(), RankGroup.bring_back

    def tell(group: RankGroup, ranks: list[int]) -> list[int]:
        has_begun.set()
        return bring_back(group, ranks)

    death = "die_once(rank == 1 and epoch == 2, 'gone')"
    with monkeypatch.context() as patch:
        patch.setattr(RankGroup, "bring_back", tell)
        run = lab.train("ddp", cell(death), every=3, background=True, **options)
        assert has_begun.wait(60)
        run.stop()
        run.wait()
    assert run.state == "interrupted"
    assert [each.ranks for each in run.restarts] == [[1]]
    [*_, last] = all_in(tmp_path / "kept")
    resumed = lab.train(
        "ddp", cell("pass"), **{**options, "elastic": False, "resume": True}
    )
    assert resumed.resumed_from == int(last.name.removeprefix("step-"))
    assert np.isfinite(resumed.last_loss)
    assert resumed.num_steps == 16
