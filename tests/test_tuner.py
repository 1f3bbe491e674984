"""Studies without ranks: a function plays what a trial does to them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import labkit
from labkit import estimate
from labkit.notebook.history.collector import Collector
from labkit.notebook.runs.run import Run
from labkit.notebook.tuning.options import TuneOptions
from labkit.notebook.tuning.space import why_not
from labkit.notebook.tuning.storage import database
from labkit.notebook.tuning.storage import studies_folder
from labkit.notebook.tuning.study import Study
from labkit.notebook.tuning.tuner import Tuner
from labkit.notebook.tuning.tuner import TuneRequest
from labkit.notebook.tuning.tuner import with_values
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
        self.has_sigint = False

    def stop_at_a_step(self) -> None:
        """It has ended already."""


def lose(run: Run, *losses: float) -> None:
    """The ranks of the run send these."""
    found = np.zeros(len(losses), RECORD)
    found["step"] = np.arange(1, len(losses) + 1)
    found["value"] = losses
    run.collector.add(0, Batch(0, [NOTICED_LOSS], found))


def tune(
    space: Any,
    trial: Trial,
    *,
    fits: Any = None,
    estimate: Any = None,
    run_options: Any = None,
    **options: Any,
) -> Study:
    """A study whose trials do as `trial` says, once they have begun."""

    def work(**params: Any) -> None:
        pass

    def train(strategy: str, work: Any, *, name: str, watch: Any, **given: Any) -> Run:
        run = Run(name, strategy, "", Collector([0]))
        run.end("finished")
        if hasattr(trial, "refuses"):
            trial.refuses(given)
        watch.begin(run, Execution())
        lose(run, 1.0)
        trial(watch, work.keywords, given)
        return run

    request = TuneRequest(
        work, space, "ddp", TuneOptions(**options), run_options or {}, False, fits
    )
    return Tuner(request, train, lambda: None, estimate).run()


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
