"""Wrong, contradictory and hostile input: one line says what is allowed, and nothing
has changed."""

import contextlib
import inspect
import io
import json
import math
import os
import threading
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import MISSING
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.testing.globalipapp import start_ipython
from test_saved_runs import end
from test_saved_runs import log
from test_saved_runs import new_run

import labkit
from labkit import Lab
from labkit import RankError
from labkit.checks import check_timeout
from labkit.checks import is_run_name
from labkit.checks import short_repr
from labkit.magics.lab_magics import LabMagics
from labkit.magics.line import usage_errors
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.cluster.placement import place_ranks
from labkit.notebook.cluster.reach import CallError
from labkit.notebook.execution.options import RunOptions
from labkit.notebook.execution.options import check_options
from labkit.notebook.live.widget_view import find_view
from labkit.notebook.runs import persistence
from labkit.rank_spec import parse_ranks
from labkit.strategies import find_strategy

pytestmark = pytest.mark.timeout(120)

Captured = pytest.CaptureFixture[str]

fuzzed = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,  # the same examples on every machine, day after day
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

text = st.text(st.characters(), max_size=20)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**31, 2**63, 1e308]),
    st.floats(),
    text,
    st.binary(max_size=5),
)
anything = st.recursive(
    plain, lambda each: st.lists(each) | st.dictionaries(text, each), max_leaves=5
)


def complaint(call: Callable[[], Any]) -> str:
    """What the ValueError of a call says; "" where it raises none."""
    try:
        call()
    except ValueError as error:
        message = str(error)
        assert message
        assert len(message.splitlines()) == 1, message
        assert len(message) < 600, message
        return message
    return ""


# ---- arguments ----


@fuzzed
@given(anything)
def test_ranks_are_ranks_or_an_error_of_one_line(ranks: Any) -> None:
    if not complaint(lambda: parse_ranks(ranks, 4)):
        found = parse_ranks(ranks, 4)
        assert found
        assert found == sorted(set(found))
        assert set(found) <= {0, 1, 2, 3}


@fuzzed
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_parts_of_ranks_are_put_together(parts: list[tuple[int, int]]) -> None:
    words = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    wanted = {rank for a, b in parts for rank in range(a, b + 1)}
    if all(a <= b for a, b in parts) and wanted <= set(range(6)):
        assert parse_ranks(words, 6) == sorted(wanted)
    else:
        assert complaint(lambda: parse_ranks(words, 6))


@pytest.mark.parametrize("ranks", ["0-999999999", "9" * 5000, range(10**12), "٣"])
def test_very_many_ranks_cost_nothing(ranks: Any) -> None:
    assert complaint(lambda: parse_ranks(ranks, 2))


def place(**options: Any) -> Any:
    return place_ranks(StartOptions(**options), num_gpus=0)


@fuzzed
@given(anything)
def test_options_are_what_they_should_be_or_an_error_of_one_line(value: Any) -> None:
    if not complaint(lambda: check_timeout("timeout", value)):
        assert value is None or 0 < value < math.inf
    assert complaint(lambda: find_strategy(value))
    if not complaint(lambda: find_view(value)):
        assert isinstance(value, bool)
    if not complaint(lambda: place(num_ranks=value)):
        assert value is None or value in range(1, 10**5)
    for name in ("backend", "device"):
        assert complaint(lambda name=name: place(**{name: value}))
    for name in ("threads", "group_timeout_s"):
        options: dict[str, Any] = {name: value}
        if not complaint(lambda options=options: place(**options)):
            assert value is None or 0 < value <= 1e7

    def check(name: str) -> str:
        options = RunOptions(**{name: value})
        return complaint(
            lambda: check_options(
                find_strategy("ddp"), options, device="cpu", world_size=2
            )
        )

    assert check("precision")
    if not check("accumulate"):
        assert value in range(1, 2**31 + 1)
    if not check("clip"):
        assert value is None or 0 < value < math.inf
    for each in fields(RunOptions):
        found = check(each.name)
        if isinstance(each.default, bool) and each.name not in NOT_ALONE:
            assert bool(found) is not isinstance(value, bool)


NOT_ALONE = ("resume", "elastic", "asynchronous")
"""Options that need another one, or a strategy."""

# Keywords are written out, for help and completion; here they are held to the dataclass
# that all else is made from.


def test_a_lab_takes_every_option_by_its_name() -> None:
    options = {each.name: each.default for each in fields(StartOptions)}
    parameters = [*inspect.signature(Lab).parameters.values()][:-1]
    assert {each.name: each.default for each in parameters} == options
    assert parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    actions = {action.dest: action for action in LabMagics.dist_start.parser._actions}
    assert set(actions) == set(options) - {"group_timeout_s"}
    for name, action in actions.items():
        assert action.default == options[name]
        assert f"\n{name} : " in str(inspect.getdoc(Lab))
    assert actions["num_ranks"].option_strings == ["-n", "--num-ranks"]


def test_train_takes_every_option_by_its_name() -> None:
    options = {
        each.name: None if each.default is MISSING else each.default
        for each in fields(RunOptions)
    }
    parameters = list(inspect.signature(Lab.train).parameters.values())[3:]
    assert {each.name: each.default for each in parameters} == options
    actions = {action.dest: action for action in LabMagics.dist_train.parser._actions}
    assert set(actions) == {"strategy", "function", "no_live", *options}
    for name, default in options.items():
        assert f"\n{name} : " in str(inspect.getdoc(Lab.train))
        assert actions[name].default == default


@fuzzed
@given(anything)
def test_what_was_found_is_shown_in_one_line(value: Any) -> None:
    assert len(short_repr(value)) < 400
    assert len(short_repr(value).splitlines()) <= 1
    assert short_repr(10**5000) == "a huge int"


@fuzzed
@given(st.text())
def test_a_run_name_is_a_word_that_a_folder_can_have(name: str) -> None:
    if is_run_name(name):
        assert Path(name).name == name
        assert not name.startswith(("-", "."))
        assert len(os.fsencode(name)) <= 200
    for bad in ("", ".", "..", "../x", "-x", "--delete", "a b", "a\n", "x" * 201):
        assert not is_run_name(bad)


# ---- magic lines ----

MAGICS = sorted({**LabMagics.magics["line"], **LabMagics.magics["cell"]})
NEAR = (
    "ddp raw all 0 0,1 9 -1 nan inf 1e999 --name --name= --seed --timeout --clip bf16 "
    "--precision --live widget --no-live --config --rank --all --full --ranks --memory "
    "--last --state finished --strategy --delete --input --optimizer x .. ../.. / . 'x "
    '"x" --nonsense -n -x -- @x'
)
words = st.one_of(st.sampled_from(NEAR.split()), text)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """IPython with the magics and no lab, and a folder of runs of its own."""
    monkeypatch.setenv(persistence.FOLDER_VARIABLE, str(tmp_path / "runs"))
    monkeypatch.setattr(
        "tempfile.tempdir", str(tmp_path.parent)
    )  # no lab is kept there
    found = get_ipython() or start_ipython()
    found.run_line_magic("load_ext", "labkit")
    return found


@fuzzed
@given(magic=st.sampled_from(MAGICS), line=st.lists(words, max_size=5).map(" ".join))
@pytest.mark.long
def test_any_magic_line_is_done_or_explained_in_one_line(
    shell: Any, tmp_path: Path, magic: str, line: str
) -> None:
    if magic in ("dist_start", "dist_check"):
        line += " --nonsense"  # it would start a lab
    before = dict(shell.user_ns)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if magic == "dist":
                shell.run_cell_magic(magic, line, "1 / 0")
            else:
                shell.run_line_magic(magic, line)
    except UsageError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        assert len(message) < 1000, message
    assert shell.user_ns == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("magic", MAGICS)
def test_an_unknown_option_is_answered_with_what_there_is(
    shell: Any, magic: str
) -> None:
    run = shell.run_cell_magic if magic == "dist" else shell.run_line_magic
    cell = ["1"] if magic == "dist" else []
    actions = getattr(LabMagics, magic).parser._actions
    needed = "".join(
        " ".join(["", *a.option_strings[:1], "x"]) for a in actions if a.required
    )
    with pytest.raises(
        UsageError, match="unrecognized arguments: --nonsense"
    ) as caught:
        run(magic, f"--nonsense{needed}", *cell)
    message = str(caught.value)
    assert all(a.option_strings[0] in message for a in actions if a.option_strings)
    shown = "%%dist" if magic == "dist" else f"%{magic}"
    assert f"; {shown}? shows its help" in message
    assert shell.object_inspect_text(shown)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dist_train ddp f --seed 1 --seed 2", "--seed is given twice"),
        ("dist_train ddp f --live widget --no-live", "--live and --no-live: choose"),
        ("dist_train ddp f --sync", "unrecognized arguments: --sync"),
        ("dist_train ddp f --name 'x", "No closing quotation"),
        ("dist_pull x --all --rank 0", "--all and --rank: choose one"),
        ("dist_runs --state over", "unknown state 'over'; choose one of: running,"),
        ("dist_runs --strategy dpp", "unknown strategy 'dpp'; choose one of: single"),
        ("dist_start -n 99999999999999", "ranks do not fit into the .* of this"),
        ("dist_start --threads 1000000", "threads is 1000000; .* from 1 to 1,024"),
        ('dist_start --launcher-options "-p x -t 1"', "^--launcher-options -p x -t 1 "),
    ],
)
def test_what_contradicts_itself_or_cannot_be_is_refused(
    shell: Any, line: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        shell.run_line_magic(*line.split(" ", 1))


def state_of_a_lab() -> None:
    labkit.current_lab()


def wrong_value() -> None:
    parse_ranks("7", 2)


@pytest.mark.parametrize("mistake", [state_of_a_lab, wrong_value])
def test_what_a_user_can_mend_is_one_line(mistake: Callable[[], None]) -> None:
    with pytest.raises(UsageError), usage_errors():
        mistake()


def fault_of_a_library() -> None:
    pd.concat([])


def fault_at_run_time() -> None:
    raise RuntimeError("dictionary changed size during iteration")


@pytest.mark.parametrize(
    ("fault", "error"),
    [(fault_of_a_library, ValueError), (fault_at_run_time, RuntimeError)],
)
def test_a_fault_keeps_its_traceback(
    fault: Callable[[], None], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught, usage_errors():
        fault()
    assert type(caught.value) is error  # UsageError is none of these
    assert fault.__name__ in [frame.name for frame in caught.traceback]


# ---- files ----


def use(run: labkit.Run) -> None:
    """Look at all that a run from disk has to show."""
    assert repr(run)
    run.history, run.memory, run.comm, run.theory, run.mismatches, run.models  # noqa: B018
    run.summary()
    run.status_line()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs: one that is whole, and one to be damaged."""
    monkeypatch.setenv(persistence.FOLDER_VARIABLE, str(tmp_path / "runs"))
    for name in ("whole", "damaged"):
        run = new_run(name)
        for rank in (0, 1):
            log(run, rank, ("loss", 1, 0.5), ("lr", 1, 0.125), ("loss", 2, 0.25))
        end(run)
    return tmp_path / "runs"


def check_damaged(folder: Path) -> None:
    """One run is listed, loaded and deleted whatever became of the other's files."""
    [path] = folder.glob("*-damaged")
    with contextlib.redirect_stderr(io.StringIO()):
        table = labkit.list_runs()
        assert "whole" in table.index
        assert table["total_peak"].dtype.kind == "f"
        use(labkit.load_run("whole"))
        for name in ("damaged", path.name):
            with contextlib.suppress(ValueError):
                use(labkit.load_run(name))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda each: st.lists(each) | st.dictionaries(text, each),
    max_leaves=4,
)


@settings(fuzzed, max_examples=30)
@given(data=st.data())
@pytest.mark.long
def test_a_run_json_with_wrong_values_breaks_nothing_else(
    folder: Path, data: st.DataObject
) -> None:
    [path] = folder.glob("*-damaged/run.json")
    was = path.read_text()
    info = json.loads(was)
    for key in data.draw(st.sets(st.sampled_from(sorted(info)), min_size=1)):
        place, where = info, key
        while (
            isinstance(place[where], dict) and place[where] and data.draw(st.booleans())
        ):
            place, where = (
                place[where],
                data.draw(st.sampled_from(sorted(place[where]))),
            )
        place[where] = data.draw(json_values)
    path.write_text(json.dumps(info))
    check_damaged(folder)
    path.write_text(was)


@settings(fuzzed, max_examples=30)
@given(
    name=st.sampled_from(
        ["run.json", "records.parquet", "rank-0.records", "rank-0.names"]
    ),
    cut=st.floats(0, 1),
    put=st.binary(max_size=40),
)
@pytest.mark.long
def test_a_file_that_is_cut_or_overwritten_breaks_nothing_else(
    folder: Path, name: str, cut: float, put: bytes
) -> None:
    [path] = folder.glob("*-damaged")
    was = {each: each.read_bytes() for each in path.iterdir()}
    if name.startswith("rank"):
        (path / "records.parquet").unlink()
        whole = np.ones(3, labkit.records.RECORD).tobytes()
        (path / "rank-0.records").write_bytes(whole)
        (path / "rank-0.names").write_bytes(b'[1, "loss"]\n')
    content = (path / name).read_bytes()
    at = int(cut * len(content))
    for damaged in (content[:at], content[:at] + put + content[at + len(put) :]):
        (path / name).write_bytes(damaged)
        check_damaged(folder)
    for each in path.iterdir():
        each.unlink()
    for each, content in was.items():
        each.write_bytes(content)


def test_tables_of_other_columns_and_odd_files_break_nothing_else(folder: Path) -> None:
    [path] = folder.glob("*-damaged")
    table = pd.read_parquet(path / "records.parquet")
    for change in (
        table.drop(columns="step"),
        table.assign(rank="0"),
        table.assign(metric=None),
        table.assign(step=table["step"].astype(float)),
        table.iloc[:0],
    ):
        change.to_parquet(path / "records.parquet")
        check_damaged(folder)
    for name in ("records.parquet", "rank-0.records", "rank-0.names", "run.json"):
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)  # to open it would never end
        check_damaged(folder)
        (path / name).unlink()
        (path / name).symlink_to("/dev/zero")  # neither would reading
        check_damaged(folder)
        (path / name).unlink()


@pytest.mark.parametrize("name", ["..", ".", "", "../runs", "/", "x" * 5000, "a\0", 5])
def test_only_runs_are_deleted(folder: Path, name: Any) -> None:
    [run] = folder.glob("*-whole")
    for place in (folder, folder.parent):  # even where that looks like a run
        (place / "run.json").write_bytes((run / "run.json").read_bytes())
    (folder / "linked").symlink_to(run)
    before = sorted(folder.parent.rglob("*"))
    for names in ([name], ["damaged", name], ["linked"]):
        assert complaint(lambda names=names: labkit.delete_runs(*names))
    assert complaint(lambda: labkit.load_run(name))
    assert sorted(folder.parent.rglob("*")) == before


def test_a_folder_of_runs_that_cannot_be_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/runs", "x" * 300):
        monkeypatch.setenv(persistence.FOLDER_VARIABLE, str(tmp_path / place))
        assert labkit.list_runs().empty
        assert "there is no run 'x'" in complaint(lambda: labkit.load_run("x"))
        run = new_run("x")
        end(run)
        assert run.folder is None
        assert "labkit: " in capsys.readouterr().err
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(persistence.FOLDER_VARIABLE, "~/runs")
    assert persistence.runs_folder() == tmp_path / "runs"


# ---- on ranks ----


@pytest.fixture
def kept(lab: Lab, folder: Path) -> Iterator[Lab]:
    """A lab of which nothing may have changed at the end: no run, no folder, no
    variable, and the same processes."""
    lab.run("kept = [rank, 'kept']\nnames = set(globals()) | {'names'}")
    before = list(lab.runs), sorted(folder.iterdir()), list(lab.status()["pid"])
    yield lab
    lab.run(
        "new = set(globals()) - names - {'new'}\nnew = [n for n in new if n[0] != '_']"
    )
    assert lab.pull("new", "all") == [[], []]
    assert lab.pull("kept", "all") == [[0, "kept"], [1, "kept"]]
    after = list(lab.runs), sorted(folder.iterdir()), list(lab.status()["pid"])
    assert after == before


class Unmakeable:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('made')",)


def test_wrong_arguments_of_a_lab_change_nothing(kept: Lab) -> None:
    lab = kept
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    model = torch.nn.Linear(2, 2)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("is neither code nor a function", lambda: lab.run(5)),  # type: ignore[arg-type]
        ("the code cannot be sent as UTF-8", lambda: lab.run("'\ud800'")),
        ("the code cannot be sent as UTF-8", lambda: lab.train("raw", "'\ud800'")),
        ("is neither code nor a function", lambda: lab.train("raw", b"1")),  # type: ignore[arg-type]
        ("unknown strategy []", lambda: lab.train([], "1")),  # type: ignore[arg-type]
        ("run name '../x'; use letters", lambda: lab.train("raw", "1", name="../x")),
        ("run name 5; use letters", lambda: lab.train("raw", "1", name=5)),  # type: ignore[arg-type]
        ("background is 'no'", lambda: lab.train("raw", "1", background="no")),  # type: ignore[arg-type]
        ("log_scale is 1; it", lambda: lab.train("raw", "1", log_scale=1)),  # type: ignore[arg-type]
        ("no signature found", lambda: lab.train("raw", int)),
        (
            "cannot pickle",
            lambda: lab.train("ddp", "1", config={"a": threading.Lock()}),
        ),
        (
            "cannot be loaded in another",
            lambda: lab.train("ddp", "1", config={"a": Unmakeable()}),
        ),
        ("cannot be loaded in another", lambda: lab.push(x=Unmakeable())),
        ("cannot be sent to another process", lambda: lab.push(x=deep)),
        ("x cannot be sent to another process", lambda: lab.push(ok=1, x=lab)),
        ("every rank has a rank of its own", lambda: lab.push(rank=5)),
        ("push got 'x' and no variable; give each by its name", lambda: lab.push("x")),
        ("every rank has a __builtins__ of its own", lambda: lab.push(__builtins__=5)),
        ("'a b' is not a valid", lambda: lab.push(**{"a b": 5})),
        ("'for' is not a valid", lambda: lab.push(**{"for": 5})),
        ("takes a variable's name; found", lambda: lab.pull(["x"])),  # type: ignore[arg-type]
        ("cannot pickle 'sqlite3.Conn", lambda: lab.pull("get_ipython")),
        ("; take values from it in a %%dist cell", lambda: lab.pull("get_ipython")),
        ("full is 'x'; it must", lambda: lab.pull("kept", full="x")),  # type: ignore[arg-type]
        ("is not a run's name", lambda: lab.find_runs([5])),  # type: ignore[list-item]
        ("the input is tuple", lambda: lab.estimate(model, ())),
        ("the input is Tensor", lambda: lab.estimate(model, torch.tensor(1.0))),
        (
            "optimizer is 5; give",
            lambda: lab.estimate(model, torch.ones(1, 2), optimizer=5),
        ),
        (
            "world sizes are 5",
            lambda: lab.estimate(model, torch.ones(1, 2), world_sizes=5),
        ),  # type: ignore[arg-type]
        (
            "a world size is",
            lambda: lab.estimate(model, torch.ones(1, 2), world_sizes=[10**12]),
        ),
        (
            "memory is nan bytes",
            lambda: lab.estimate(model, torch.ones(1, 2), device_bytes=math.nan),
        ),
    ]
    for message, call in calls:
        assert message in complaint(call), message


def test_a_request_that_a_rank_does_not_know_is_answered(kept: Lab) -> None:
    cluster = kept._running().cluster
    for request, arguments in (("nonsense", {}), ("interrupt", {"wrong": 1})):
        with pytest.raises(CallError, match=f"rank 0 cannot answer '{request}'"):
            cluster.ask(0, request, **arguments).result(timeout=10)


def test_a_name_that_is_no_text_hides_no_rank(lab: Lab) -> None:
    lab.run(
        "import threading\nend = threading.Event()\ndef wait(): end.wait(30)\n"
        "threading.Thread(target=wait, name='a \\ud800').start()"
    )
    found = lab._running().cluster.ask(0, "stack").result(timeout=10)
    lab.run("end.set()")
    assert "a ?" in found["others"]


WRONG_IN_A_CELL = {
    "log(a='x')": "log(a=...) takes a number or a tensor of one element; found str 'x'",
    "log(a=10**400)": "log(a=...) takes a number",
    "log(a=torch.ones(2))": "found a tensor of shape (2,)",
    "log(a=1, step='x')": "log(step='x'): the step must be a whole number",
    "log(a=1, step=10**30)": "the step must be a whole number",
    "log(**{'': 1})": "log(''=...): a metric's name is a string of 1 to 200",
    "log(**{'\\ud800': 1})": "is a string of",
    "log(**{'x' * 201: 1})": "is a string of 1 to 200 bytes",
    "log(**{'(epoch)': 1})": "is labkit's own; choose another name",
    "prepare(m, o, d)": "batch_size is None; it must be a whole number, 1 or more: the",
    "prepare(m, o, d, batch_size=4, weigh=1)": "weigh is 1; give a function of a",
    "prepare(m, o, d, batch_size=4, reduction=1)": "choose one of: mean, sum",
    "prepare(torch.nn.LazyLinear(2), o, d, batch_size=4)": "call model(x) once before",
    "prepare(None, o, d, batch_size=4)": "model is None; prepare takes a torch.nn.Mod",
    "prepare(m, 'sgd', d, batch_size=4)": "optimizer is str 'sgd'; make one",
    "prepare(m, o, d, batch_size=4, shuffle='x')": "shuffle is 'x'; it must be True",
    "prepare(m, o, d, batch_size=10**30)": "from 1 to 2,147,483,648",
    "prepare(m, o, 5, batch_size=4)": "int has no length",
    "prepare(m, o, 'mnist', batch_size=4)": "the dataset is 'mnist'; give a dataset or",
    "prepare(m, o, f, batch_size=4)": "the dataset is cross_entropy itself; call it",
    "prepare(f, o, d, batch_size=4)": "model is the function cross_entropy; prepare t",
    "prepare(m, object(), d, batch_size=4)": "optimizer is an object of type object;",
    "prepare(m, torch.optim.SGD, d, batch_size=4)": "optimizer is the class SGD; make",
    "fit(m, d, 5, optimizer=o, batch_size=4)": "loss_fn is int 5; give a function",
    "fit(m, d, f, optimizer=o, batch_size=4, epochs=1.5)": "epochs is 1.5; it must",
    "fit(m, d, f, optimizer=o, validate=d, metrics=5)": "metrics are 5; give a dict",
    "fit(m, d, f, optimizer=o, validate=d, metrics={'loss': f})": "without the name",
    "fit(m, d, f, optimizer=o, validate=d, metrics={'a': 5})": "metrics['a'] is 5; g",
}


def test_wrong_arguments_in_a_training_cell_are_explained(
    lab: Lab, folder: Path
) -> None:
    lab.push(wrong=list(WRONG_IN_A_CELL))
    run = lab.train(
        "single",
        "m = torch.nn.Linear(2, 2)\n"
        "o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "d, f = [(torch.ones(2), 0)] * 8, torch.nn.functional.cross_entropy\n"
        "said = []\n"
        "for line in wrong:\n"
        "    try:\n        said.append(eval(line) and '')\n"
        "    except ValueError as error:\n        said.append(str(error))\n"
        "log(fine=1.0)",
        live=False,
    )
    for line, found in zip(WRONG_IN_A_CELL, lab.pull("said"), strict=True):
        assert WRONG_IN_A_CELL[line] in found, line
        assert len(found.splitlines()) == 1
        assert len(found) < 300
    assert list(run.history["fine"]) == [1.0]
    assert set(run.history) == set(labkit.load_run(run.name).history)


HOSTILE = [
    "import sys; sys.stdout = sys.stderr = None",
    "import sys; sys.stdout.close(); sys.stderr.close()",
    "import sys; sys.displayhook = sys.excepthook = None",
    "del rank, world_size, device, dist, torch",
    "rank = dist = torch = None",
    "__builtins__ = None",
    "get_ipython().user_ns.clear()",
    "import os, tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())",
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "exit()",
    "raise SystemExit",
    "def f(): f()\nf()",
    "raise ValueError('x' * 10**6)",
    "raise ValueError('\\ud800')",
    "class A:\n    def __repr__(self): raise KeyError('x')\nA()",
    "import os; os.write(1, bytes(range(256)))",
    *(
        f"get_ipython().data_pub.publish_data({{'labkit': {value}}})"
        for value in ("5", "('batch', 5)", "('outcome', None)", "('error', {})")
    ),
    "class A: pass\nget_ipython().data_pub.publish_data({'mine': A()})",
    "from IPython.display import publish_display_data as show; show({'text/plain': 5})",
]


@pytest.mark.long
def test_no_cell_takes_the_next_one_with_it(lab: Lab, capsys: Captured) -> None:
    pids = list(lab.status()["pid"])
    where = Path.cwd()
    for code in HOSTILE:
        for train in (False, True):
            with contextlib.suppress(RankError):
                if train:
                    lab.train("ddp", code, live=False, timeout=20)
                else:
                    lab.run(code, timeout=20)
        capsys.readouterr()
        lab.run("x = torch.ones(1)\ndist.all_reduce(x)\nprint(rank)\nx.item()")
        out = capsys.readouterr().out
        assert out == "[rank 0] 0\n[rank 1] 1\n[ranks 0-1] 2.0\n", code
    lab.run(f"import os; os.chdir({str(where)!r})")
    assert list(lab.status()["pid"]) == pids
