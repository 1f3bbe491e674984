"""Studies without ranks: a function plays what a trial does to them."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import labkit
from labkit import estimate
from labkit.checks import UserError
from labkit.notebook.history.collector import Collector
from labkit.notebook.runs.run import Run
from labkit.notebook.trials.space import why_not
from labkit.notebook.trials.work import with_values
from labkit.notebook.tuning.crew import Place
from labkit.notebook.tuning.crew import StudyRanks
from labkit.notebook.tuning.options import TuneOptions
from labkit.notebook.tuning.storage import database
from labkit.notebook.tuning.storage import studies_folder
from labkit.notebook.tuning.study import Study
from labkit.notebook.tuning.tuner import Tuner
from labkit.notebook.tuning.tuner import TuneRequest
from labkit.records import NOTICED_LOSS
from labkit.records import RECORD
from labkit.records import Batch

optuna = pytest.importorskip("optuna")

Trial = Callable[..., Any]
"""Takes the trial's watch, its parameters and its run options."""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))


class Execution:
    """What a watch may ask of a cell that runs."""

    def __init__(self) -> None:
        self.had_sigint = False

    def stop_at_a_step(self) -> None:
        """It has ended already."""

    def interrupt(self) -> None:
        """It has ended already."""


def lose(run: Run) -> None:
    """The rank of the run sends its loss, and the same as val_loss."""
    found = np.zeros(2, RECORD)
    found["metric"], found["step"], found["value"] = [0, 1], 1, 1.0
    run.collector.add(0, Batch(0, [NOTICED_LOSS, "val_loss"], found))


def tune(
    space: Any,
    trial: Trial,
    *,
    fits: Any = None,
    estimate: Any = None,
    run_options: Any = None,
    refuse: Any = None,
    **options: Any,
) -> Study:
    """A study whose trials do as `trial` says, once they have begun, which `refuse`
    may not let them."""

    def work(**params: Any) -> None:
        pass

    def train(strategy: str, work: Any, options: Any, watch: Any) -> Run:
        run, given = Run(options.name, strategy, "", Collector([0])), vars(options)
        run.end("finished")
        if refuse is not None:
            refuse(given)
        execution = run.execution = Execution()
        watch.begin(run, execution)
        lose(run)
        trial(watch, work.keywords, given)
        return run

    request = TuneRequest(
        work, space, "ddp", TuneOptions(**options), run_options or {}, False, fits
    )

    @contextlib.contextmanager
    def divided(num_ranks: int) -> Iterator[list[Place]]:
        yield [Place("rank 0", train, lambda: None)]

    return Tuner(request, StudyRanks(1, "cpu", divided, estimate)).run()


def nothing(watch: Any, params: Any, options: Any) -> None:
    """A trial that ends well."""


def states(study: Study, name: str = "level") -> dict[Any, str]:
    found: dict[Any, str] = study.table.set_index(name)["state"].to_dict()
    return found


@pytest.mark.parametrize(
    ("sampler", "number"),
    [("grid", 1), ("grid", 3), ("grid", 4), ("own", 3), ("tpe", 2)],
)
def test_a_study_goes_on_after_an_interrupt(sampler: str, number: int) -> None:
    space = {"level": [1, 2, 3, 4]}
    begun = []

    def trial(watch: Any, params: Any, options: Any) -> None:
        begun.append(params["level"])
        if len(begun) == number:
            raise KeyboardInterrupt

    own = optuna.samplers.GridSampler(space) if sampler == "own" else sampler
    options = {"sampler": own, "name": "stopped", "trials": 4}
    tune(space, trial, **options)
    assert len(begun) == number
    study = tune(space, trial, **options, resume=True)
    assert begun[number] == begun[number - 1]  # first of all, again
    assert study.table["state"].tolist() == ["finished"] * 4
    if sampler != "tpe":
        assert sorted(study.table["level"]) == [1, 2, 3, 4]


def save(watch: Any, params: Any, options: Any) -> None:
    """A trial with a checkpoint."""
    folder = Path(options["checkpoint"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step-1").touch()


def test_a_study_removes_no_folder_but_its_own(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = {"run_options": {"checkpoint": kept}, "sampler": "grid"}
    first = tune({"level": [1, 2]}, save, name="first", **options)
    assert first.best_checkpoint == kept / "first" / f"trial-{first.best_trial}"
    assert [path.name for path in (kept / "first").iterdir()] == [
        first.best_checkpoint.name
    ]
    # Folders that are there before a trial begins; some are refused.
    for number in range(4):
        (kept / "second" / f"trial-{number}").mkdir(parents=True)

    def refuse(given: Any) -> None:
        if given["checkpoint"].name == "trial-1":
            raise ValueError("it holds checkpoints")

    space = {"level": [1, 2], "strategy": ["ddp", "fsdp"]}
    second = tune(space, save, name="second", refuse=refuse, **options)
    assert second.table["state"].tolist().count("failed") == 1
    assert "checkpoint" not in second.optuna.trials[1].user_attrs
    assert len(list((kept / "second").iterdir())) == 4
    assert (first.best_checkpoint / "step-1").exists()


def test_ranks_that_hang_fail_their_trial_and_not_the_study() -> None:
    def trial(watch: Any, params: Any, options: Any) -> None:
        if params["level"] == 2:
            raise UserError("the ranks wait for one that has left the cell")

    study = tune({"level": [1, 2, 3]}, trial, sampler="grid")
    assert states(study) == {1: "finished", 2: "failed", 3: "finished"}
    assert list(study.errors.values()) == [
        "the ranks wait for one that has left the cell"
    ]

    def refuse(given: Any) -> None:
        raise UserError("the lab has been stopped")

    with pytest.raises(UserError, match="has been stopped"):
        tune({"level": [1, 2]}, nothing, refuse=refuse, name="refused")
    assert labkit.load_study("refused").trials == []


@pytest.mark.parametrize("why", ["it fell behind", ""])
def test_an_interrupt_while_a_trial_is_stopped_ends_the_study(why: str) -> None:
    begun = []

    def trial(watch: Any, params: Any, options: Any) -> None:
        begun.append(params["level"])
        if len(begun) == 2:
            watch.why_stopped = why
            watch.run.execution.had_sigint = True
            watch.run.end("interrupted")

    study = tune({"level": [1, 2, 3, 4]}, trial, sampler="grid", name="stopped")
    assert len(begun) == 2
    pruned = ["pruned"] if why else []
    assert study.table["state"].tolist() == ["finished", *pruned]
    study = tune(
        {"level": [1, 2, 3, 4]}, trial, sampler="grid", name="stopped", resume=True
    )
    assert sorted(study.table["level"]) == [1, 2, 3, 4]


def test_a_run_that_somebody_stops_has_no_result() -> None:
    begun = []

    def trial(watch: Any, params: Any, options: Any) -> None:
        begun.append(params["level"])
        if len(begun) == 1:
            watch.run.end("interrupted")

    options = {"sampler": "random", "trials": 2, "name": "stopped"}
    study = tune({"level": [1, 2]}, trial, **options)
    assert study.table["state"].tolist() == ["finished"] * 2
    assert study.table.index.tolist() == [1, 2]
    assert study.optuna.trials[0].state.name == "FAIL"


@pytest.mark.parametrize(
    ("given", "is_compared"),
    [
        ({"space": {"level": [1, 2]}}, True),
        ({"space": {"batch_size": [8, 16]}}, False),
        ({"space": {"batch_size": [8, 16]}, "metric": "val_loss"}, True),
        ({"space": {"batch_size": [8, 16]}, "pruner": "none"}, None),
    ],
)
def test_losses_of_other_batch_sizes_are_not_compared(
    given: dict[str, Any], is_compared: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    pruners = []

    def trial(watch: Any, params: Any, options: Any) -> None:
        pruners.append(type(watch._trial.study.pruner).__name__)

    given = dict(given)
    tune(given.pop("space"), trial, sampler="grid", **given)
    assert pruners == ["NopPruner", "HyperbandPruner" if is_compared else "NopPruner"]
    said = "batch_size is in the space" in capsys.readouterr().err
    assert said == (is_compared is False)


def test_the_curve_of_a_trial_that_is_stopped_has_all_its_points() -> None:
    def trial(watch: Any, params: Any, options: Any) -> None:
        found = np.zeros(4, RECORD)
        found["step"], found["value"] = [2, 3, 4, 5], [2.0, 3.0, 4.0, 5.0]
        watch.run.collector.add(0, Batch(2, [NOTICED_LOSS, "val_loss"], found))
        watch.tick()  # at its first point it is stopped, and three others have come
        watch.run.end("interrupted")

    pruner = optuna.pruners.ThresholdPruner(upper=0.5)
    study = tune({"level": [1]}, trial, sampler="grid", pruner=pruner)
    assert states(study) == {1: "pruned"}
    assert study.curves["place"].tolist() == [1, 2, 3, 4, 5]
    assert study.curves["value"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_study_that_was_killed_while_it_was_made_is_none() -> None:
    folder = studies_folder() / "half"
    folder.mkdir(parents=True)
    database(folder)
    with pytest.raises(ValueError, match="there are: none"):
        labkit.load_study("half")
    with pytest.raises(ValueError, match="there is no study 'half'"):
        tune({"level": [1]}, nothing, name="half", resume=True)
    assert len(tune({"level": [1]}, nothing, name="half", trials=1).table) == 1
    assert len(labkit.load_study("half").table) == 1


@pytest.mark.parametrize("with_x", [False, True])
@pytest.mark.parametrize(("mib", "skipped"), [(1, True), (400, True), (4000, False)])
def test_a_trial_is_skipped_where_its_model_does_not_fit(
    with_x: bool, mib: int, skipped: bool
) -> None:
    import torch

    def build(width: int = 5000) -> Any:
        with torch.device("meta"):
            model = torch.nn.Linear(width, width)
            return (model, torch.zeros(4, width)) if with_x else model

    def forecast(model: Any, x: Any, batch_size: Any = None, **options: Any) -> Any:
        device_bytes = mib * 2**20
        table, *_ = estimate.forecast(
            model, x, world_sizes=[2], device_bytes=device_bytes, batch_size=batch_size
        )
        return SimpleNamespace(table=table, device_bytes=device_bytes)

    why = why_not(build, forecast, {}, "ddp", {})
    assert why.startswith("forecast 572 MiB of") == skipped
    assert bool(why) == skipped


@pytest.mark.parametrize(
    "code",
    [
        "found = lr\n",
        "# %%dist_tune ddp\nfound = lr",
        "from __future__ import annotations\nfound = lr",
        "from __future__ import annotations  # why\nfound = lr",
        "from __future__ import annotations; found = lr",
        "from __future__ import annotations",
        "# a\n\n'''ä\nb'''\nfrom __future__ import (\n  annotations,\n)\n\nfound = lr",
        "'''ä'''; from __future__ import annotations; found = lr",
        "'''\nfrom __future__ import annotations\n'''\nfound = lr",
        "from __future__ import division\nfrom __future__ import annotations\nlr",
    ],
)
def test_parameters_come_after_what_has_to_be_first(code: str) -> None:
    filled = with_values(code, {"lr": 0.1})
    names: dict[str, Any] = {}
    exec(compile(filled, "cell", "exec"), names)
    assert names["lr"] == names.get("found", 0.1) == 0.1
    if "import annotations" in code and not code.startswith("'''\n"):
        assert filled.count("\n") == code.count("\n")  # lines have their numbers


def test_parameters_come_before_magics_in_a_cell() -> None:
    code = "from __future__ import annotations\n%time f()\n!ls"
    assert with_values(code, {"lr": 0.1}).splitlines() == [
        "from __future__ import annotations; lr = 0.1",
        "%time f()",
        "!ls",
    ]
