"""Studies on a real cluster: what a trial does to itself is not done to the study."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import interrupt_when
from kernels import Kernel
from kernels import running_kernel

import labkit
from labkit import Lab
from labkit import RankError
from labkit.notebook.history.collector import Collector
from labkit.notebook.trials.live_metric import LiveMetric
from labkit.notebook.trials.live_metric import next_place
from labkit.notebook.trials.space import distributions_of
from labkit.notebook.trials.watch import TrialWatch
from labkit.records import LOSS_WEIGHT
from labkit.records import NOTICED_LOSS
from labkit.records import RECORD
from labkit.records import Batch

optuna = pytest.importorskip("optuna")

Captured = pytest.CaptureFixture[str]

DEVICE_BYTES = "labkit.notebook.diagnostics.status.device_bytes_of"
LOOP = """
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    loss = (model(torch.ones(1, 1)) * 0 + level).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SHORT = LOOP.format(steps=20)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))


def grid(*values: float) -> dict[str, Any]:
    """A space of these levels, each of which is tried once, in some order."""
    return {"space": {"level": list(values)}, "sampler": "grid"}


def tune(lab: Lab, work: Any, *, strategy: str = "raw", **options: Any) -> Any:
    return lab.tune(work, strategy=strategy, live=False, **options)


def test_a_study_finds_the_best_and_is_there_afterwards(lab: Lab) -> None:
    code = "# %%dist_tune raw --space space\n" + SHORT
    study = tune(lab, code, **grid(3, 1, 2), name="levels")
    assert study.best_params == {"level": 1}
    assert study.best_value == pytest.approx(1.0)
    assert repr(study) == "<Study 'levels': loss under raw, 3 trials>"
    assert study.best_run.code.startswith("level = 1  # %%dist_tune raw")
    assert lab.studies[-1] is study
    assert study.best_run.name == f"levels-trial-{study.best_trial}"
    table = study.table
    assert sorted(table["level"]) == [1, 2, 3]
    assert table["value"].tolist() == pytest.approx(table["level"] ** 2)
    assert table["steps"].tolist() == [20] * 3
    again = labkit.load_study("levels")
    assert again.table.equals(table)
    assert again.best_run.history.equals(study.best_run.history)
    assert again.plot()._repr_png_()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="there are: levels"):
        labkit.load_study("level")


def test_a_function_takes_the_parameters_by_name(lab: Lab) -> None:
    def train(rank: int, world_size: int, level: int, kind: str) -> None:
        import torch

        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            loss = (model(torch.ones(1, 1)) * 0 + level + rank).mean()
            (loss if kind == "a" else -loss).backward()
            optimizer.step()

    space = {"level": (1, 5), "kind": ["a", "b"]}
    study = tune(lab, train, space=space, trials=6, pruner="none")
    assert study.best_params["kind"] == "b"
    assert study.best_value == -study.best_params["level"] - 0.5  # the mean over ranks
    study = tune(lab, train, space=space, trials=6, pruner="none", mode="max")
    assert study.best_params["kind"] == "a"
    assert study.best_value == study.best_params["level"] + 0.5
    with pytest.raises(ValueError, match="does not take width, which the space has"):
        tune(lab, train, space={"width": [1, 2]})
    with pytest.raises(ValueError, match="also takes width, which the space does not"):
        tune(lab, lambda level, width, rank: None, space={"level": [1, 2]})


@pytest.mark.timeout(60)
def test_what_falls_behind_is_stopped_at_the_same_step_on_every_rank(lab: Lab) -> None:
    # The one above the threshold would go on for a quarter of an hour.
    code = LOOP.format(steps="20 if level == 0 else 10**7")
    pruner = optuna.pruners.ThresholdPruner(upper=5.0)
    study = tune(lab, code, **grid(0, 9), pruner=pruner)
    by_level = study.table.set_index("level")
    assert by_level["state"].to_dict() == {0: "finished", 9: "pruned"}
    run = study.run_of(int(study.table.index[study.table["level"] == 9][0]))
    assert len(set(run.collector.steps.values())) == 1
    assert run.state == "interrupted"
    lab.check()


@pytest.mark.timeout(60)
@pytest.mark.long
def test_a_loss_that_is_no_number_ends_its_trial(lab: Lab) -> None:
    code = LOOP.format(steps="20 if level == 1 else 10**7").replace(
        "* 0 + level", "* 0 + (level if level == 1 else float('nan'))"
    )
    study = tune(lab, code, **grid(1, 2))
    states = study.table.set_index("level")["state"].to_dict()
    assert states == {1: "finished", 2: "pruned"}


@pytest.mark.timeout(60)
def test_a_rank_that_dies_fails_its_trial_and_not_the_study(
    lab: Lab, capsys: Captured
) -> None:
    code = (
        "import os, signal\n"
        "if level == 2 and rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()\n" + SHORT
    )
    study = tune(lab, code, **grid(1, 2, 3), name="deaths")
    states = study.table.set_index("level")["state"].to_dict()
    assert states == {1: "finished", 2: "failed", 3: "finished"}
    [error] = study.errors.values()
    assert "SIGKILL" in error
    assert study.best_params == {"level": 1}
    said = capsys.readouterr().err
    assert "failed, and the study goes on" in said
    assert "SIGKILL" in said


@pytest.mark.timeout(60)
@pytest.mark.long
def test_an_exception_fails_its_trial_and_three_at_once_end_the_study(
    lab: Lab, capsys: Captured
) -> None:
    code = "if level == 2: raise OSError(f'no data for {level}')\n" + SHORT
    study = tune(lab, code, **grid(1, 2, 3))
    assert study.table["state"].tolist().count("failed") == 1
    assert "no data for 2" in capsys.readouterr().err
    with pytest.raises(RankError, match="no data for"):
        tune(lab, code.replace("== 2", "> 0"), **grid(1, 2, 3, 4), name="all")
    assert len(labkit.load_study("all").table) == 3
    with pytest.raises(RuntimeError, match="no trial of all has finished"):
        _ = labkit.load_study("all").best_params


@pytest.mark.timeout(60)
def test_an_interrupt_ends_the_study_with_what_it_has(
    lab: Lab, tmp_path: Path, capsys: Captured
) -> None:
    num_before = len(lab.runs)

    def second_trains() -> bool:
        return len(lab.runs) == num_before + 2 and bool(lab.runs[-1].num_steps)

    options = {"space": {"level": [1, 2]}, "trials": 2, "name": "stopped"}
    options |= {"pruner": "none", "sampler": "random"}
    started = tmp_path / "started"
    started.touch()
    # The second trial, on both ranks, would go on for a quarter of an hour.
    code = (
        "dist.barrier()\n"
        f"number = len(open({str(started)!r}).read())\n"
        "dist.barrier()\n"
        f"if rank == 0: open({str(started)!r}, 'a').write('x')\n"
        + LOOP.format(steps="10**7 if number == 1 else 20")
    )
    with interrupt_when(second_trains):
        study = tune(lab, code, **options)
    assert study.table["state"].tolist() == ["finished"]
    assert "interrupted; stopped keeps what it has" in capsys.readouterr().err
    lost = study.optuna.trials[1].params["level"]
    study = tune(lab, code, **options, resume=True)
    assert study.table["state"].tolist() == ["finished"] * 2
    assert study.table["level"].iloc[1] == lost  # is run again


@pytest.mark.timeout(60)
@pytest.mark.long
def test_an_interrupt_while_a_trial_is_stopped_ends_the_study(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = TrialWatch._stop

    def stop_and_interrupt(watch: TrialWatch, why: str) -> None:
        stop(watch, why)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrialWatch, "_stop", stop_and_interrupt)
    code = LOOP.format(steps="10**7").replace("+ level", "+ level * float('nan')")
    study = tune(lab, code, **grid(1, 2, 3))
    assert study.table["state"].tolist() == ["pruned"]
    lab.check()


CHILD = """
import sys
from labkit import Lab
code = {code!r}
with Lab(num_ranks=2) as lab:
    lab.tune(code, {{"level": [1, 2, 3]}}, strategy="raw", trials=4, name="killed",
             sampler="random", live=False, pruner="none")
"""


@pytest.mark.timeout(120)
@pytest.mark.long
def test_a_study_goes_on_after_the_death_of_its_kernel(
    lab: Lab, tmp_path: Path
) -> None:
    marker = tmp_path / "third"
    # The third trial waits to be killed.
    code = (
        "import pathlib, time\n"
        f"marker = pathlib.Path({str(marker)!r})\n"
        "count = pathlib.Path(f'{marker}.{rank}')\n"
        "number = len(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text('x' * number)\n"
        "if number == 3:\n"
        "    marker.touch()\n"
        "    time.sleep(1000)\n" + SHORT
    )
    script = tmp_path / "study.py"
    script.write_text(CHILD.format(code=code))
    space = {"level": [1, 2, 3]}
    options = {"name": "killed", "sampler": "random", "pruner": "none"}
    child = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path)
    try:
        while not marker.exists():
            assert child.poll() is None, "the study ended early"
            time.sleep(0.05)
        with pytest.raises(ValueError, match=f"another kernel, process {child.pid};"):
            tune(lab, code, space=space, trials=4, resume=True, **options)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    left = labkit.load_study("killed")
    assert left.table["state"].tolist() == ["finished"] * 2
    [lost] = [t for t in left.optuna.trials if t.state.name == "RUNNING"]
    with pytest.raises(ValueError, match="add resume=True"):
        tune(lab, code, space=space, trials=4, **options)
    with pytest.raises(ValueError, match=r"created with space = .* use the same space"):
        tune(lab, code, space={"level": [1, 2]}, resume=True, **options)
    study = tune(lab, code, space=space, trials=4, resume=True, **options)
    assert study.table["state"].tolist() == ["finished"] * 4
    assert study.table["level"].iloc[2] == lost.params["level"]  # first of all, again
    assert study.best_run.num_steps == 20


def test_the_best_trial_keeps_its_checkpoint(lab: Lab, tmp_path: Path) -> None:
    code = """
from torch import nn
from torch.utils.data import TensorDataset
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
fit(model, data, lambda output, y: output.mean() * 0 + level, optimizer=optimizer,
    batch_size=4)
"""
    options = grid(3, 1, 2) | {"checkpoint": tmp_path / "kept", "pruner": "none"}
    study = tune(lab, code, strategy="ddp", **options)
    folder = tmp_path / "kept" / study.name
    best = folder / f"trial-{study.best_trial}"
    assert study.best_checkpoint == best
    assert list(folder.iterdir()) == [best]
    assert any(best.iterdir())


def test_strategies_are_tried_and_the_fastest_is_found(lab: Lab) -> None:
    code = """
from torch import nn
from torch.utils.data import TensorDataset
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
fit(model, data, nn.functional.mse_loss, optimizer=optimizer, batch_size=batch_size,
    epochs=2)
"""
    space = {"strategy": ["ddp", "fsdp"], "batch_size": [8, 16]}
    study = tune(lab, code, space=space, trials=4, metric="samples_per_s")
    assert study.strategy == "several strategies"
    assert study.is_max
    assert study.best_run.strategy == study.best_params["strategy"]
    rate = study.best_run.steps_per_s() * study.best_params["batch_size"]
    assert study.best_value == pytest.approx(rate, rel=0.01)


def test_what_is_forecast_not_to_fit_is_skipped(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    # In bytes, of a model of 400 MB under AdamW: 1600 MB under ddp, half under fsdp.
    monkeypatch.setattr(DEVICE_BYTES, lambda group: 1.2e9)

    def build(width: int) -> torch.nn.Module:
        with torch.device("meta"):
            layers = [torch.nn.Linear(width, width) for _ in range(4)]
            return torch.nn.Sequential(*layers)

    space = {"strategy": ["ddp", "fsdp"], "width": [10, 5000]}
    options = {"space": space, "sampler": "grid", "metric": "steps_per_s"}
    code = """
from torch.utils.data import TensorDataset
model = torch.nn.Linear(2, 1)
data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
fit(model, data, torch.nn.functional.mse_loss, batch_size=4, epochs=2,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
"""
    study = tune(lab, code, strategy="ddp", fits=build, **options)
    states = study.table.set_index(["strategy", "width"])["state"].to_dict()
    assert states == {
        ("ddp", 10): "finished",
        ("fsdp", 10): "finished",
        ("ddp", 5000): "skipped",
        ("fsdp", 5000): "finished",
    }
    assert "1 skipped" in study.summary()
    assert study.plot()._repr_png_()
    with pytest.raises(ValueError, match="fits takes width, which the space does not"):
        tune(lab, code, space={"strategy": ["ddp"]}, fits=build)


def test_what_cannot_be_is_said_before_anything_runs(lab: Lab) -> None:
    num_runs = len(lab.runs)
    for options, says in (
        ({"space": {}}, "give a dict of ranges by parameter"),
        ({"space": {"lr": (1, 0)}}, "low has to be less than high"),
        ({"space": {"lr": (0.0, 1.0, "log")}}, 'with "log" low is more than 0'),
        ({"space": {"lr": 0.1}}, r"space\['lr'\] is 0.1; write \(low, high\)"),
        ({"space": {"f": [print]}}, "choices are numbers, strings"),
        ({"space": {"rank": [1]}}, "rank"),
        ({"space": {"strategy": ["ddp", "foo"]}}, "unknown strategy 'foo'; choose"),
        ({"space": {"strategy": (1, 2)}}, "is a range; give a list of strategies"),
        ({"metric": 5}, "metric is 5; it must be a string of 1 to 200 bytes"),
        ({"pruner": "asha"}, "unknown pruner 'asha'; choose one of: hyperband"),
        (
            {"sampler": 3},
            "sampler is 3; give one of tpe, random, grid, or a sampler of",
        ),
        ({"space": {"lr": (0.1, 1.0)}, "sampler": "grid"}, "and lr is a range"),
        ({"trials": 0}, "trials is 0; it must be a whole number, 1 or more"),
        ({"resume": True}, "resume needs the name"),
        (
            {"resume": True, "name": "none"},
            "there is no study 'none' .* leave out resume",
        ),
        ({"background": True}, "tune does not take background"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"strategy": "dp"}, "unknown strategy 'dp'"),
        (
            {"metric": "accuracy"},
            "has no metric 'accuracy'; it has loss, steps",
        ),
        (
            {"work": "print(level)"},
            "no metric 'loss'; it took no optimizer step and logged nothing: call",
        ),
        ({"work": "log(accuracy=level)"}, "no metric 'loss'; it has accuracy. Choose"),
    ):
        given = {"work": SHORT, "space": {"level": [1, 2]}} | options
        with pytest.raises(ValueError, match=says):
            tune(lab, **given)
    # A name under which nothing came about is free.
    with pytest.raises(ValueError, match="has no metric 'accuracy'"):
        tune(lab, SHORT, space={"level": [1]}, metric="accuracy", name="again")
    study = tune(lab, SHORT, space={"level": [1]}, trials=1, name="again")
    assert len(study.table) == 1
    num_runs += 4
    assert len(lab.runs) == num_runs + 1  # to see which metrics there are


@pytest.mark.long
@pytest.mark.usefixtures("runs_folder")
def test_the_magic_tunes_a_cell_and_a_function(kernel: Kernel) -> None:
    kernel.run('space = {"level": [1, 2, 3]}')
    cell = "%%dist_tune raw --space space --trials 3 --name magic --sampler random\n"
    done = kernel.run(cell + SHORT)
    assert done.status == "ok", done
    [picture] = done.displays
    assert picture["text/plain"] == "<picture of the study magic: all trials>"
    assert picture["image/png"]
    assert done.result["text/plain"] == "<Study 'magic': loss under raw, 3 trials>"
    kernel.run("def f(level):\n    for _ in range(3): log(loss=level)")
    done = kernel.run("%dist_tune raw f --space space --trials 2 --no-live")
    assert done.status == "ok", done
    done = kernel.run("%dist_tune raw f --space nothing")
    assert done.status == "error"


# ---- the parts ----


def test_a_space_is_read_as_written() -> None:
    found = distributions_of(
        {
            "lr": (1e-4, 1, "log"),
            "layers": (1, 4),
            "rate": (0.0, 0.5, 0.1),
            "width": [32, 64],
            "own": optuna.distributions.FloatDistribution(0, 1),
        }
    )
    kinds = optuna.distributions
    assert found == {
        "lr": kinds.FloatDistribution(1e-4, 1, log=True),
        "layers": kinds.IntDistribution(1, 4),
        "rate": kinds.FloatDistribution(0.0, 0.5, step=0.1),
        "width": kinds.CategoricalDistribution([32, 64]),
        "own": kinds.FloatDistribution(0, 1),
    }


def records(metric: list[int], steps: list[int], values: list[float]) -> np.ndarray:
    found = np.zeros(len(metric), RECORD)
    found["metric"], found["step"], found["value"] = metric, steps, values
    return found


def test_a_curve_is_the_weighted_mean_over_ranks_of_whole_steps() -> None:
    collector = Collector([0, 1])
    curve = LiveMetric(collector, "loss")
    assert curve.final() is None
    names = [NOTICED_LOSS, LOSS_WEIGHT]
    first = records([0, 1] * 3, [1, 1, 2, 2, 3, 3], [4.0, 3.0, 2.0, 1.0, 1.0, 1.0])
    collector.add(0, Batch(0, names, first))
    second = records([0, 1, 0, 1, 0], [1, 1, 2, 2, 3], [8.0, 1.0, 6.0, 1.0, 5.0])
    collector.add(1, Batch(0, names, second))
    assert curve.new_points() == [(1, 5.0), (2, 4.0)]
    assert curve.new_points() == []
    # The weight of the last loss came in another batch.
    collector.add(1, Batch(5, names, records([1], [3], [3.0])))
    assert curve.new_points() == []  # another may follow
    assert curve.new_points(is_final=True) == [(3, 4.0)]
    assert curve.final() == 4.0
    # Of a run that stopped: a rank has taken a step that the other has not.
    collector.add(0, Batch(6, names, records([0, 1], [4, 4], [0.5, 1.0])))
    assert curve.new_points() == []
    assert curve.new_points(is_final=True) == [(4, 0.5)]


def test_a_metric_that_one_rank_alone_logs_waits_for_the_others_step() -> None:
    collector = Collector([0, 1])
    curve = LiveMetric(collector, "score")
    names = [NOTICED_LOSS, "score"]
    collector.add(0, Batch(0, names, records([0, 1, 0], [1, 1, 2], [9.0, 5.0, 9.0])))
    assert curve.new_points() == []
    collector.add(1, Batch(0, names, records([0], [1], [9.0])))
    assert curve.new_points() == []  # it may still log its own
    collector.add(1, Batch(1, names, records([0], [2], [9.0])))
    assert curve.new_points() == [(1, 5.0)]


def test_places_are_the_same_in_every_run_and_few_in_a_long_one() -> None:
    places = [0]
    while places[-1] < 10_000:
        places.append(next_place(places[-1]))
    assert places[1:10] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert len(places) < 50
    assert all(math.isfinite(place) for place in places)


def test_optuna_is_loaded_without_a_word_where_ipywidgets_is_not_installed() -> None:
    code = "import sys\nsys.modules['ipywidgets'] = None  # as where it is not there\n"
    code += "from labkit.notebook.trials.space import load_optuna\nload_optuna()"
    with running_kernel() as kernel:
        reply = kernel.run(code)
    assert (reply.status, reply.stderr) == ("ok", "")
