"""What ranks publish: messages are taken, and anything else is passed over."""

import copy
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hostile_files import FEW
from test_hostile_files import JSON
from test_hostile_files import MEASURED
from test_hostile_files import place_in
from test_hostile_files import read_all

import labkit
from labkit import Lab
from labkit.messages import is_message
from labkit.messages import message
from labkit.notebook.history.collector import Collector
from labkit.notebook.runs import persistence
from labkit.notebook.runs.run import Run
from labkit.records import KEY
from labkit.records import RECORD
from labkit.records import Averages
from labkit.records import Batch
from labkit.records import Draw
from labkit.records import ModelFacts
from labkit.records import Note
from labkit.records import Outcome
from labkit.records import ReplicaNotes

pytestmark = pytest.mark.timeout(120)

RECORDS = np.array([(1, 1, 0.5, 7, 2.0), (2, 1, 0.6, 7, 1.0)], RECORD)
DRAW = Draw(1, 8, 4, 2**64 - 1, 3)
MESSAGES: list[tuple[str, Any]] = [
    ("batch", Batch(0, ["(unwritten)", "loss", "(epoch)"], RECORDS)),
    ("report", MEASURED),
    ("report", Note("a sentence")),
    ("report", ReplicaNotes(0, [1, 2], ["w"], np.ones((2, 1), "i8"), [DRAW], [], 5, 2)),
    ("failing", "error"),
    ("outcome", Outcome(0, "error", "ValueError", "no", num_records=2)),
    ("report", Averages(4, 1, 8, 8, 0.1)),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ[persistence.FOLDER_VARIABLE]
    parent = tmp_path_factory.mktemp("store")
    os.environ[persistence.FOLDER_VARIABLE] = str(parent)
    yield parent
    os.environ[persistence.FOLDER_VARIABLE] = before


def take(name: str, value: Any) -> None:
    """As the notebook takes it, in a run that is then shown, written and read."""
    run = Run("run", "ddp", "the code", Collector([0, 1]))
    persistence.begin(run, seed=3, devices=["cpu"] * 2, backend="gloo", config=None)
    outcomes = [Outcome(0, "ok"), Outcome(1, "ok")]
    if name == "batch":
        run.collector.add(0, value)
    elif name == "report":
        run.collector.add_report(0, value)
        run.collector.add_report(1, MESSAGES[3][1])
    elif name == "outcome":
        outcomes[0] = value
    read_all(run)
    persistence.end(run, "finished", outcomes)
    assert run.folder is not None
    read_all(labkit.load_run(run.folder.name))


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_a_message_is_one(store: Path, number: int) -> None:
    name, value = MESSAGES[number]
    assert is_message(message(name, value)[KEY], 0)
    take(name, value)


@pytest.mark.parametrize(
    ("value", "key", "other"),
    [
        (MESSAGES[3][1], "place", np.ones((2, 2))),
        (MEASURED.models[0], "num_shards", 0),
        (MEASURED.models[0], "num_parts", 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_compared_or_divided_by_is_no_message(
    value: Any, key: str, other: Any
) -> None:
    wrong = copy.deepcopy(value)
    vars(wrong)[key] = other  # as a pickle may have it
    if isinstance(wrong, ModelFacts):
        wrong = dataclasses.replace(MEASURED, models=[wrong])
    assert not is_message(("report", wrong), 0)


@pytest.mark.parametrize("name", ["", "x" * 1000, "\udcff"], ids=["no", "long", "raw"])
def test_records_of_a_metric_that_no_file_can_name_are_no_message(name: str) -> None:
    """A run with them could be saved, and never be read."""
    batch = Batch(0, ["(unwritten)", name, "(epoch)"], RECORDS)
    assert not is_message(("batch", batch), 0)


OTHER = [np.ones((2, 2)), RECORDS[:1], np.zeros(3, "i8"), object(), (), {1}]


@FEW
@given(data=st.data())
def test_a_message_with_any_value_is_taken_or_passed_over(
    store: Path, data: st.DataObject
) -> None:
    name, value = copy.deepcopy(data.draw(st.sampled_from(MESSAGES[:4] + MESSAGES[5:])))
    at, last = place_in(value, data)
    at[last] = data.draw(JSON | st.sampled_from(OTHER))
    if is_message((name, value), 0):
        take(name, value)


PUBLISHED = """
import numpy as np
from labkit.records import *
publish = get_ipython().data_pub.publish_data
class OfRanks: pass
records = np.zeros(2, RECORD)
records["metric"] = 9
names = ["(unwritten)", "loss"]
log(loss=1.0)
for forged in [
    OfRanks(), 5, ("batch", OfRanks()), ("stream", 5), ("failing", 5), ("reply", 5),
    ("batch", Batch(0, names, records)), ("batch", Batch(1, names, np.zeros(3))),
    ("batch", Batch(None, None, None)), ("report", Measurement({}, [], [])),
    ("report", Note(5)),
    ("report", ReplicaNotes(0, [1], ["w"], None, None, None, 0, 0)),
    ("outcome", Outcome(7, "ok")), ("outcome", Outcome(rank, None)),
]:
    publish({"labkit": forged})
publish({"mine": OfRanks()})
records["metric"] = 1
publish({"labkit": ("batch", Batch(0, names, records))})
publish({"labkit": ("batch", Batch(2**50, names, records))})
log(loss=float("nan"), odd=np.float16(0.5), step=np.int64(2**61))
log(loss=torch.tensor(3.0, dtype=torch.bfloat16), step=-(2**61))
"""


def test_a_run_outlives_what_its_cell_publishes(lab: Lab) -> None:
    run = lab.train("raw", PUBLISHED, live=False, timeout=30)
    assert run.state == "finished"
    assert run.folder is not None
    for each in (run, labkit.load_run(run.folder.name)):
        assert each.collector.num_lost == 0
        for rank in (0, 1):
            own = each.collector.series(rank, "loss")
            assert {-(2**61), 0, 2**61} <= {*own["step"].tolist()}
        read_all(each)
        each.plot()
    lab.run("x = torch.ones(1)\ndist.all_reduce(x)", timeout=30)
    assert lab.pull("x", "all") == [2, 2]
