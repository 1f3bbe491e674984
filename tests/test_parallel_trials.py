"""Studies whose trials run at once, on groups of ranks: a real lab of four."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interrupts import interrupt_when

from labkit import Lab
from labkit import RankError

optuna = pytest.importorskip("optuna")
DEVICE_BYTES = "labkit.notebook.diagnostics.status.device_bytes_of"
pytestmark = pytest.mark.timeout(120)

Captured = pytest.CaptureFixture[str]

TRIAL = """
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0)
x = torch.randn(24, 4)
layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
fit(layers, TensorDataset(x, x[:, :1]), nn.functional.mse_loss, batch_size=8, epochs=2,
    optimizer=torch.optim.SGD(layers.parameters(), lr=lr))
"""
USE = """
try:
    sharded(torch.ones(1, 4))
except ValueError:  # torch does not know the group
    pass
else:
    raise AssertionError("two ranks used what four have a share of")
"""
LOOP = """
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    loss = (model(torch.ones(1, 1)) * 0 + level).square().mean()
    loss.backward()
    dist.all_reduce(torch.ones(1))
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def lab_of_4(shared_lab_of_4: Lab) -> Iterator[Lab]:
    """It works before and after each test on all ranks, which keep what they have."""
    lab = shared_lab_of_4
    lab.restart()
    lab.run("kept = 10 * rank")
    pids = lab.status()["pid"].tolist()
    yield lab
    lab.run(
        "assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())\n"
        "assert os.environ['RANK'] == str(rank) and world_size == 4\n"
        "total = torch.tensor(rank)\n"
        "dist.all_reduce(total)\n"
        "assert total == 6".replace("os.", "__import__('os').")
    )
    now = lab.status()["pid"].tolist()
    same = [rank for rank, pid in enumerate(pids) if now[rank] == pid]
    assert lab.pull("kept", same) == [10 * rank for rank in same]


def tune(lab: Lab, work: Any, space: Any, **options: Any) -> Any:
    given = {"strategy": "raw", "sampler": "grid", "ranks_per_trial": 2} | options
    return lab.tune(work, space, live=False, **given)


@pytest.mark.long
def test_trials_in_groups_have_the_losses_of_a_lab_of_that_size(
    lab: Lab, lab_of_4: Lab
) -> None:
    lab_of_4.train("fsdp", "lr = 0.1" + TRIAL, live=False)
    lab_of_4.run(
        "sharded = layers\n"
        "before = sharded(torch.ones(1, 4)).detach()\n"
        "sharded.reshard()"
    )
    strategies = ["ddp", "zero2", "fsdp"]
    study = tune(lab_of_4, USE + TRIAL, {"strategy": strategies, "lr": [0.05, 0.1]})
    assert study.table["state"].tolist() == ["finished"] * 6
    assert set(study.table["ranks"]) == {"ranks 0-1", "ranks 2-3"}
    for strategy in strategies:
        alone = lab.train(strategy, "lr = 0.1" + TRIAL, live=False).mean_loss()
        of_this = study.table.query(f"strategy == '{strategy}' and lr == 0.1")
        run = study.run_of(int(of_this.index[0]))
        assert run.world_size == 2
        assert run.mean_loss()["loss"].tolist() == alone["loss"].tolist()
    # What is sharded among all ranks is theirs again.
    lab_of_4.run("assert torch.equal(sharded(torch.ones(1, 4)), before)")


def test_what_one_group_does_to_itself_is_not_done_to_the_others(
    lab_of_4: Lab, tmp_path: Path, capsys: Captured
) -> None:
    # The first two are at work together, and the last goes on until others have ended.
    code = f"""
import os, pathlib, signal, time
begun = [pathlib.Path({str(tmp_path)!r}, f"{{each}}") for each in range(4)]
assert (world_size, dist.get_world_size(), dist.get_rank()) == (2, 2, rank)
assert os.environ["RANK"] == str(rank) and os.environ["WORLD_SIZE"] == "2"
begun[level].touch()
if level == 1 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if level == 2:
    raise OSError("no data")
while level == 0 and not all(each.exists() for each in begun):
    time.sleep(0.01)
print("at", level)
""" + LOOP.format(steps=20)
    study = tune(lab_of_4, code, {"level": [0, 1, 2, 3]})
    states = study.table.set_index("level")["state"].to_dict()
    assert states == {0: "finished", 1: "failed", 2: "failed", 3: "finished"}
    by_level = {study.table["level"][n]: said for n, said in study.errors.items()}
    assert "killed by SIGKILL" in by_level[1]
    assert "no data" in by_level[2]
    said = capsys.readouterr()
    [number] = study.table.index[study.table["level"] == 3]
    assert f"[trial {number}, ranks 0-1] at 3" in said.out
    assert re.search(r"-trial-\d \(ranks (0-1|2-3)\) failed", said.err)


def test_ranks_that_ran_no_trial_are_in_all_groups_again(lab_of_4: Lab) -> None:
    lab_of_4.run("pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]")
    study = tune(lab_of_4, LOOP.format(steps=2), {"level": [1]})
    assert set(study.table["ranks"]) <= {"ranks 0-1", "ranks 2-3"}
    lab_of_4.run(
        "total = torch.tensor(rank)\n"
        "dist.all_reduce(total, group=pairs[rank % 2])\n"
        "assert total == (4 if rank % 2 else 2)\n"
        "del pairs"
    )


@pytest.mark.long
def test_a_trial_that_no_first_one_came_before_is_not_compared(
    lab_of_4: Lab, tmp_path: Path
) -> None:
    # The losses of all fall alike. The second waits, when it is far on, until the third
    # has begun, where the first has finished.
    code = f"""
import pathlib, time
begun = [pathlib.Path({str(tmp_path)!r}, f"{{each}}") for each in range(3)]
number = torch.tensor(0)
while rank == 0:
    try:
        begun[number].mkdir()
        break
    except FileExistsError:
        number += 1
dist.broadcast(number, 0)
w = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([w], lr=0.0)
for step in range(27):
    (w * 0.9 ** step).sum().backward()
    optimizer.step()
    while number == 1 and step == 11 and not begun[2].exists():
        time.sleep(0.01)
    time.sleep(0.1 if number == 2 or step > 11 and number == 1 else 0)
"""
    study = tune(lab_of_4, code, {"level": [0, 1, 2]}, pruner="halving")
    assert study.table["state"].tolist() == ["finished"] * 3
    compared = [
        any(name.startswith("completed_rung") for name in each.system_attrs)
        for each in study.optuna.get_trials()
    ]
    assert compared[:2] == [False, False]


@pytest.mark.long
def test_one_interrupt_kills_no_group_that_is_slow_to_end(
    lab_of_4: Lab, tmp_path: Path
) -> None:
    # The other group ends at once; then this one runs on for longer than a second
    # interrupt would let it.
    code = f"""
import pathlib, time
begun = pathlib.Path({str(tmp_path)!r}, f"{{level}}-{{rank}}")
begun.touch()
try:
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    end = time.monotonic() + 4
    while level == 1 and time.monotonic() < end:
        time.sleep(0.01)
    raise
"""

    pids = lab_of_4.status()["pid"].tolist()
    with interrupt_when(lambda: len(list(tmp_path.glob("[01]-[01]"))) == 4):
        tune(lab_of_4, code, {"level": [0, 1]})
    assert lab_of_4.status()["pid"].tolist() == pids


@pytest.mark.long
def test_three_failures_at_first_end_the_trials_of_all_groups(lab_of_4: Lab) -> None:
    # The fourth would wait for ever before its first step.
    code = "import time\nif level < 4: raise OSError('no data')\ntime.sleep(1000)"
    levels = optuna.samplers.GridSampler({"level": [1, 2, 3, 4]}, seed=0)
    with pytest.raises(RankError, match="no data"):
        tune(lab_of_4, code, {"level": [1, 2, 3, 4]}, sampler=levels, trials=4)
    assert all(run.state != "running" for run in lab_of_4.runs)


@pytest.mark.long
def test_an_interrupt_ends_all_trials_and_the_study(
    lab_of_4: Lab, capsys: Captured
) -> None:
    num_before = len(lab_of_4.runs)

    def both_train() -> bool:
        runs = lab_of_4.runs[num_before:]
        return len(runs) == 2 and all(run.num_steps for run in runs)

    code = LOOP.format(steps=10**7)
    with interrupt_when(both_train):
        study = tune(lab_of_4, code, {"level": [1, 2, 3]}, name="stopped")
    assert study.table.empty
    assert [run.state for run in lab_of_4.runs[num_before:]] == ["interrupted"] * 2
    assert "interrupted; stopped keeps what it has" in capsys.readouterr().err
    code = LOOP.format(steps=5)
    study = tune(lab_of_4, code, {"level": [1, 2, 3]}, name="stopped", resume=True)
    assert sorted(study.table["level"]) == [1, 2, 3]


def test_groups_that_cannot_be_are_refused_before_anything_runs(
    lab_of_4: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_runs = len(lab_of_4.runs)
    for options, says in (
        ({"ranks_per_trial": 3}, "4 ranks cannot be divided .* one of 1, 2, 4, or"),
        ({"ranks_per_trial": 8}, "choose one of 1, 2, 4"),
        ({"ranks_per_trial": 0}, "ranks_per_trial is 0; it must be a whole number"),
        ({"strategy": "hsdp", "mesh": "dp_replicate=2,dp_shard=2"}, "2 ranks"),
    ):
        with pytest.raises(ValueError, match=says):
            tune(lab_of_4, LOOP, {"level": [1]}, **options)
    # Half of its states on a rank would fit, were it on all four.
    monkeypatch.setattr(DEVICE_BYTES, lambda group: 0.6e9)

    def build(width: int) -> Any:
        import torch

        with torch.device("meta"):
            layers = [torch.nn.Linear(width, width) for _ in range(4)]
            return torch.nn.Sequential(*layers)

    study = tune(lab_of_4, LOOP, {"width": [5000]}, fits=build, strategy="fsdp")
    assert study.table["state"].tolist() == ["skipped"]
    assert len(lab_of_4.runs) == num_runs
