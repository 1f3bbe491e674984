"""Files of others: each is read, or refused in words, in bounded memory and time."""

import functools
import json
import operator
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

import labkit
from labkit import checkpoint
from labkit.checkpoint import SaveError
from labkit.checkpoint.exchange import plan_from_json
from labkit.checks import is_raised_by_labkit
from labkit.notebook.history.collector import Collector
from labkit.notebook.runs import persistence
from labkit.notebook.runs.record import Restart
from labkit.notebook.runs.run import Run
from labkit.rank.data.loader import LoaderPosition
from labkit.rank.telemetry.journal import Journal
from labkit.rank.training.resume import RunCheckpointer
from labkit.rank.training.resume import random_state
from labkit.records import COMPONENTS
from labkit.records import MAX_RANKS
from labkit.records import RECORD
from labkit.records import Batch
from labkit.records import CheckpointPlan
from labkit.records import Collective
from labkit.records import Measurement
from labkit.records import ModelFacts
from labkit.records import Outcome
from labkit.records import Progress
from labkit.step_folders import step_folder

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 4
MEASURED = Measurement(
    dict.fromkeys(COMPONENTS, 8),
    [Collective("all_reduce", 1, 8, 8, 0.1)],
    [ModelFacts(10, 10, 8.0, 2)],
    seconds=0.25,
)
FEW = settings(
    max_examples=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def write_run(parent: Path, name: str, *, has_ended: bool) -> Path:
    """A run as labkit writes it: one that has ended has a table, another journals."""
    os.environ[persistence.FOLDER_VARIABLE] = str(parent)
    run = Run(name, "fsdp", "the code", Collector([0, 1]))
    persistence.begin(run, seed=3, devices=["cpu"] * 2, backend="gloo", config=None)
    assert run.folder is not None
    run.info["restarts"] = [asdict(Restart(0, 1, [1], "SIGKILL", 0.5, 1e9))]
    for rank in (0, 1):
        journal = Journal(run.folder, rank)
        names = ["(unwritten)", "loss", "(epoch)"]
        ids = [journal.add_name(each) for each in names[1:]]
        rows = [(m, s, 0.1 * s, 7, 0.5) for s in range(NUM_STEPS) for m in ids]
        for row in rows:
            journal.append(*row)
        journal.close()
        run.collector.add(rank, Batch(0, names, np.array(rows, RECORD)))
        run.collector.progress[rank] = Progress(1, 2, 2)
        run.collector.add_report(rank, MEASURED)
    if has_ended:
        outcomes = [Outcome(rank, "ok", num_records=2 * NUM_STEPS) for rank in (0, 1)]
        persistence.end(run, "finished", outcomes)
    else:
        run.info["restarts"] = []
        run.info["pid"] = 2**22 + 1  # its kernel is gone
        persistence.save(run)
    return run.folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two runs: one with a table, one with journals."""
    before = os.environ[persistence.FOLDER_VARIABLE]
    parent = tmp_path_factory.mktemp("store")
    write_run(parent, "good", has_ended=True)
    yield {
        "table": write_run(parent, "table", has_ended=True),
        "journals": write_run(parent, "journals", has_ended=False),
    }
    os.environ[persistence.FOLDER_VARIABLE] = before


def read_all(run: Run) -> None:
    """Everything that a run shows, but its picture."""
    assert all(
        each is not None
        for each in (
            *(repr(run), run.status_line(), run.history, run.memory, run.comm),
            *(run.summary(), run.mean_loss(), run.theory, run.models, run.mismatches),
            *(run.notes, run.restarts, run.not_on_disk, run.elapsed()),
        )
    )


def check_read(folder: Path) -> bool:
    """Whether the run is read; if it is not labkit says so, and lists the others."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as parent:
        warnings.simplefilter("ignore")
        shutil.copytree(folder, Path(parent, folder.name))
        for other in folder.parent.glob("*-good"):
            shutil.copytree(other, Path(parent, other.name))
        listed = labkit.list_runs(parent)
        assert "good" in listed.index
        error = None
        try:
            run = labkit.load_run(folder.name, parent)
        except ValueError as refusal:
            error = refusal
        else:
            read_all(run)
            run.refresh()
        if error is not None:
            assert is_raised_by_labkit(error), error
            assert folder.name in str(error)
        return error is None


# ---- fuzzed ----

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
JSON = st.recursive(
    PLAIN | st.sampled_from([-5, 2**40, 10**400, 1e400, "ddp", "running", "\ud800"]),
    lambda some: (
        st.lists(some, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.just("0"), some, max_size=3)
    ),
    max_leaves=4,
)


def parts_of(value: Any) -> Any:
    """What is in a dict or list, or the fields of a record, to be changed in place."""
    return vars(value) if is_dataclass(value) else value


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value in a JSON value or a record, from the outside inwards."""
    found, parts = [path] if path else [], parts_of(value)
    if isinstance(parts, dict | list):
        keys = parts if isinstance(parts, dict) else range(len(parts))
        for key in keys:
            found += places_in(parts[key], (*path, key))
    return found


def place_in(value: Any, data: st.DataObject) -> tuple[Any, Any]:
    """A part of it, and the key or index there of one to change."""
    *way, last = data.draw(st.sampled_from(places_in(value)))
    return functools.reduce(
        lambda at, key: parts_of(parts_of(at)[key]), way, parts_of(value)
    ), last


def changed(content: bytes, data: st.DataObject) -> bytes:
    """JSON in which one value is another, or is gone."""
    value = json.loads(content)
    at, last = place_in(value, data)
    if data.draw(st.booleans()):
        at[last] = data.draw(JSON)
    else:
        del at[last]
    return json.dumps(value).encode()


def damaged(content: bytes, seed: int) -> bytes:
    """With some bytes changed, some cut out, or the end cut off."""
    rng, found = random.Random(seed), bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if not found:
            break
        place, kind = rng.randrange(len(found)), rng.random()
        if kind < 0.7:
            found[place] ^= 1 << rng.randrange(8)
        elif kind < 0.85:
            found[place : place + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
        else:
            del found[max(1, place) :]
    return bytes(found)


@pytest.mark.parametrize("kind", ["table", "journals"])
@FEW
@given(data=st.data())
@pytest.mark.long
def test_a_run_json_with_any_value_is_read_or_refused_in_words(
    store: dict[str, Path], kind: str, data: st.DataObject
) -> None:
    path = store[kind] / "run.json"
    before = path.read_bytes()
    try:
        path.write_bytes(changed(before, data))
        check_read(store[kind])
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("options", "average_every"), 0, "average_every is 0; it must be a whole"),
        (
            ("options", "servers"),
            0,
            "servers is 0; it must be a whole number, 1 or more",
        ),
        (("servers",), "ab", "servers is 'ab'"),
    ],
)
def test_a_run_json_with_what_cannot_be_is_refused(
    store: dict[str, Path],
    tmp_path: Path,
    at: tuple[str, ...],
    value: Any,
    message: str,
) -> None:
    folder = tmp_path / store["table"].name
    shutil.copytree(store["table"], folder)
    info = json.loads((folder / "run.json").read_text())
    *way, last = at
    functools.reduce(operator.getitem, way, info)[last] = value
    (folder / "run.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=message):
        labkit.load_run(folder.name, tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("table", "run.json"),
        ("table", "records.parquet"),
        ("journals", "rank-0.records"),
        ("journals", "rank-1.names"),
    ],
)
@FEW
@given(seed=st.integers(0, 2**32))
@pytest.mark.long
def test_a_file_with_flipped_bytes_is_read_or_refused_in_words(
    store: dict[str, Path], kind: str, name: str, seed: int
) -> None:
    path = store[kind] / name
    before = path.read_bytes()
    content = before.rstrip(b"\0") if name.endswith(".records") else before
    try:
        path.write_bytes(damaged(content, seed))
        check_read(store[kind])
    finally:
        path.write_bytes(before)


PLAN = [["w", "TENSOR", [0, 0], [2, 3], [4, 3], "torch.float32"]]


@FEW
@given(data=st.data())
def test_a_plan_with_any_value_is_one_or_is_refused(data: st.DataObject) -> None:
    items = json.loads(changed(json.dumps([PLAN]).encode(), data))
    for each in items:
        with suppress(ValueError):
            assert len(plan_from_json(each).items) <= 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 6, as `--checkpoint` takes one."""
    folder = step_folder(tmp_path_factory.mktemp("kept"), 6)
    random_numbers = random_state(torch.device("cpu"))
    loop = {
        "step": 6,
        "seed": 0,
        "loaders": [
            {
                "position": vars(LoaderPosition(2, 1, 7)),
                "data": {"batch_size": 4, "num_samples": 8},
            }
        ],
        "active": 0,
        "schedulers": [("StepLR", {"step_size": 1, "last_epoch": 3})],
    }
    checkpoint.save(
        folder,
        {"w": torch.ones(2, 2)}
        | {f"rng.0.{name}": each for name, each in random_numbers.items()},
        {
            "sections": [{"optimizer": "SGD"}],
            "user": {"x": torch.ones(2)},
            "loop": loop,
        },
    )
    return folder


def resume_from(folder: Path) -> RunCheckpointer:
    """As much of a resumption as needs no model."""
    found = RunCheckpointer(
        CheckpointPlan(str(folder.parent), resume_from=str(folder)),
        rank=0,
        device=torch.device("cpu"),
        seed=0,
        on_checkpoint=lambda step: None,
        note=lambda text: None,
    )
    found._open()
    found._end_replay()
    return found


def resume_or_be_refused(
    saved: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    """With another content of a file; the error is in words, and names the folder."""
    path = saved / name
    before = path.read_bytes()
    error = None
    try:
        path.write_bytes(change(before))
        resume_from(saved)
    except ValueError as refusal:
        error = refusal
    finally:
        path.write_bytes(before)
    if error is not None:
        assert is_raised_by_labkit(error), error
        assert str(saved) in str(error)


def test_a_checkpoint_is_resumed_from(saved: Path) -> None:
    assert resume_from(saved).first_step == 6


@FEW
@given(data=st.data())
def test_a_manifest_with_any_value_is_read_or_refused_in_words(
    saved: Path, data: st.DataObject
) -> None:
    resume_or_be_refused(
        saved, "checkpoint.json", lambda content: changed(content, data)
    )


@FEW
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(["checkpoint.json", "rank-00000.safetensors"]),
)
def test_a_checkpoint_with_flipped_bytes_is_read_or_refused_in_words(
    saved: Path, name: str, seed: int
) -> None:
    resume_or_be_refused(saved, name, lambda content: damaged(content, seed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["loop"].update(step=-5), "step is -5"),
        (lambda v: v["loop"].update(step=7), "step 7 in a folder of another name"),
        (lambda v: v["loop"].update(active=3), "the one in use is 3"),
        (lambda v: v["loop"].update(schedulers=[3]), "TypeError"),
        (lambda v: v["loop"]["loaders"][0]["position"].pop("epoch"), "'epoch'"),
        (lambda v: v.pop("sections"), "'sections'"),
        (lambda v: v.update(sections=[]), "0 models, 1 loaders"),
    ],
)
def test_a_loop_that_cannot_be_is_refused(
    saved: Path, change: Any, message: str
) -> None:
    path = saved / "checkpoint.json"
    before = path.read_bytes()
    content = json.loads(before)
    change(content["values"])
    try:
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message) as refused:
            resume_from(saved)
    finally:
        path.write_bytes(before)
    assert "remove it to resume from the one before" in str(refused.value)


# ---- large ----

READ = """
import sys, labkit
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
labkit.load_run("good", sys.argv[1])  # with what that imports
print(peak())
for name in sys.argv[2:]:
    try:
        run = labkit.load_run(name, sys.argv[1])
        print(len(run.history), "rows")
    except ValueError as error:
        print(error)
print(sorted(labkit.list_runs(sys.argv[1]).folder))
print(peak())
"""


@pytest.mark.long
def test_large_files_cost_little(store: dict[str, Path], tmp_path: Path) -> None:
    """Each would take more than 1 GB, or minutes."""
    parent = tmp_path / "large"

    def copied(kind: str, name: str) -> Path:
        return Path(shutil.copytree(store[kind], parent / name))

    def rewrite(folder: Path, **change: Any) -> None:
        info = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**info, **change}))

    copied("table", "good")
    table = pq.read_table(store["table"] / "records.parquet").take([0] * 1_000_000)
    path = copied("table", "rows") / "records.parquet"
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(20):
            writer.write_table(table)
    assert path.stat().st_size < 2**20
    for name in ("rank-0.records", "rank-1.names"):
        os.truncate(copied("journals", name) / name, 3 * 2**30)
    os.truncate(copied("table", "info") / "run.json", 2**30)
    for number, count in (("0", 100_000), ("1", MAX_RANKS)):
        keys = {str(rank): {} for rank in range(count)}
        rewrite(
            copied("journals", f"ranks-{number}"),
            ranks=list(range(count)),
            measurements={key: [] for key in keys},
            progress=keys,
            steps=dict.fromkeys(keys, 0),
            lost=dict.fromkeys(keys, 0),
        )
    names = ["rows", "rank-0.records", "rank-1.names", "info", "ranks-0", "ranks-1"]
    done = subprocess.run(
        [sys.executable, "-c", READ, str(parent), *names],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    before, *said, listed, after = done.stdout.splitlines()
    for line, found in zip(
        said,
        [
            " bytes and 20,000,000 records",
            "8 rows",
            "8 rows",
            "run.json is larger than 32 MiB",
            "its 'ranks' is [0, 1, 2, 3, 4, 5, ...]",
            "8 rows",
        ],
        strict=True,
    ):
        assert found in line
    assert listed == str(["good", "rank-0.records", "rank-1.names", "ranks-1", "rows"])
    assert int(after) - int(before) < 300 * 2**10


def test_a_large_manifest_is_refused_and_not_written(saved: Path) -> None:
    path = saved / "checkpoint.json"
    before = path.read_bytes()
    try:
        os.truncate(path, 2**30)
        with pytest.raises(ValueError, match=r"json is larger than 32 MiB; load anoth"):
            checkpoint.read(saved)
    finally:
        path.write_bytes(before)
    with pytest.raises(SaveError, match="there is room for 32 MiB; save lists of"):
        checkpoint.save(saved, {}, {"text": "x" * 2**26})
    assert path.read_bytes() == before


def test_a_tensor_that_is_named_often_is_read_once(saved: Path) -> None:
    path = saved / "checkpoint.json"
    before = path.read_bytes()
    content = json.loads(before)
    content["values"]["user"] = [{"~tensor": "w"}] * 1000
    try:
        path.write_text(json.dumps(content))
        places = {each.data_ptr() for each in checkpoint.read(saved)[1]["user"]}
    finally:
        path.write_bytes(before)
    assert len(places) == 1
