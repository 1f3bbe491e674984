"""`--profile`: what is recorded, and what is said of it. Slowness is planted."""

import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marks import in_suites

import labkit
from labkit import Lab
from labkit.checks import steps_to_profile
from labkit.notebook.execution.elastic import Elastic
from labkit.notebook.history.collector import Collector
from labkit.notebook.profile.costs import in_steps
from labkit.notebook.profile.gpu import kernels
from labkit.notebook.profile.gpu import peak_of
from labkit.notebook.profile.merge import measure_offsets
from labkit.notebook.profile.parts import both
from labkit.notebook.profile.parts import divide_all
from labkit.notebook.profile.parts import union
from labkit.notebook.profile.parts import without
from labkit.notebook.profile.trace import MAX_BYTES
from labkit.notebook.profile.trace import Trace
from labkit.notebook.profile.trace import end_before_updates
from labkit.notebook.profile.trace import read_trace
from labkit.notebook.profile.trace import trace_of
from labkit.notebook.profile.words import NOTHING
from labkit.notebook.profile.words import why_slow
from labkit.notebook.profile.words import without_reason
from labkit.notebook.runs import persistence
from labkit.notebook.runs.record import Restart
from labkit.notebook.runs.run import Run
from labkit.rank.profiling.recorder import Recorder
from labkit.rank.profiling.step_recorder import StepRecorder
from labkit.records import CellSpec
from labkit.records import CheckpointPlan
from labkit.strategies import STRATEGIES

pytestmark = pytest.mark.timeout(120)

# ---- which steps ----


@pytest.mark.parametrize(
    ("value", "taken", "steps"),
    [
        (True, 0, range(11, 14)),
        ("3", 0, range(11, 14)),
        (5, 0, range(11, 16)),
        ("5", 100, range(111, 116)),
        ("20-24", 100, range(20, 25)),
        ("2-2", 0, range(2, 3)),
    ],
)
def test_steps_are_so_many_after_the_first_ten_or_a_range(
    value: Any, taken: int, steps: range
) -> None:
    assert steps_to_profile(value, taken) == steps


@pytest.mark.parametrize("value", [0, "0", "1-3", "5-4", "101", "2-200", "x", 1.5, -1])
def test_other_steps_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="write how many steps"):
        steps_to_profile(value)


# ---- runs that are resumed ----


def taking(recorder: Recorder, steps: range, number: range) -> None:
    """A run's steps, of which some are to be recorded."""
    profiler = StepRecorder(number, recorder)
    for step in steps:
        profiler.between_steps(step)
    profiler.end(steps[-1])
    profiler.close()


def test_a_run_that_resumes_after_its_steps_says_so(
    recorder: Recorder, notes: list[str]
) -> None:
    taking(recorder, range(30, 40), range(20, 25))
    [note] = notes
    assert note.startswith("nothing was recorded, as the run began after 30 steps, and")
    assert "step 24 was to be the last" in note
    taking(recorder, range(19, 26), range(20, 25))
    assert recorder.has_written
    taking(recorder, range(30, 40), range(20, 25))  # restarted: they are there
    assert len(notes) == 1


def test_a_restarted_run_keeps_its_profile_in_its_own_folder(tmp_path: Path) -> None:
    collector = Collector([0])
    collector.restart(5, 1.0)
    run: Any = SimpleNamespace(folder=tmp_path, collector=collector)
    plan = CheckpointPlan("kept", 5)
    spec = CellSpec(1, folder=str(tmp_path), profiles=str(tmp_path / "profile"))
    elastic = Elastic(run, ranks=None, spec=spec, plan=plan, send_work=lambda: None)  # type: ignore[arg-type]
    again = elastic._next_spec(None)
    assert again.folder == str(tmp_path / "restart-1")
    assert again.profiles == str(tmp_path / "profile")


def test_notes_on_the_profile_of_an_attempt_end_with_it() -> None:
    collector = Collector([0])
    collector.notes = ["--profile: the run ended after 9 steps", "another"]
    run: Any = SimpleNamespace(folder=None, collector=collector, info={"restarts": []})
    persistence.restart(run, [], Restart(5, 9, [1], "SIGKILL", 0.5, 1e9))
    assert collector.notes == ["another"]


@pytest.mark.parametrize(
    ("chosen", "found", "said"),
    [
        (range(4, 7), [5], "of steps 4-6, 5 was recorded: the loop takes several"),
        (range(11, 14), [11, 13], "of steps 11-13, 11, 13 were recorded: the loop"),
        (range(4, 5), [], "of step 4, nothing was recorded: the loop takes several"),
    ],
)
def test_several_steps_with_a_batch_are_recorded_as_one(
    recorder: Recorder, notes: list[str], chosen: range, found: list[int], said: str
) -> None:
    profiler = StepRecorder(chosen, recorder)
    for taken in range(0, 20, 2):
        profiler.between_steps(taken, None)
        torch.ones(3).exp()
    profiler.end(20)
    [note] = notes
    assert note.startswith(said)
    path = Path(str(recorder.folder)) / "rank-0.pt.trace.json.gz"
    assert recorder.has_written == bool(found)
    if found:
        assert [each.number for each in read_trace(path).steps] == found


def test_a_run_that_resumes_within_its_steps_says_so(
    recorder: Recorder, notes: list[str]
) -> None:
    taking(recorder, range(22, 30), range(20, 25))
    [note] = notes
    assert note == (
        "of steps 20-24, 23, 24 were recorded: the run began after 22 steps"
    )


def test_a_run_that_fails_early_is_given_no_advice(
    recorder: Recorder, notes: list[str]
) -> None:
    profiler = StepRecorder(range(11, 14), recorder, has_failed=lambda: True)
    profiler.end(0)
    assert notes == []


# ---- passes ----


@pytest.mark.parametrize("breaks", [False, True])
def test_what_lies_between_passes_is_of_no_step(
    recorder: Recorder, breaks: bool
) -> None:
    profiler = StepRecorder(range(2, 6), recorder)
    loader: Any = object()
    x = torch.ones(3)
    for taken in range(0, 6, 2):  # two steps in each pass
        for step in (taken, taken + 1):
            profiler.between_steps(step, loader)
            profiler.begin_microbatch(step + 1)
            x.sin()
            profiler.step_taken(step + 1)
            x.cos()  # as zero_grad
        if not breaks:
            profiler.between_steps(taken + 2, loader)
        profiler.end_epoch()
        x.exp()  # a validation
    profiler.end(6)
    assert recorder.has_written
    trace = read_trace(Path(str(recorder.folder)) / "rank-0.pt.trace.json.gz")
    assert [each.number for each in trace.steps] == [2, 3, 4, 5]
    assert sum(each.name == "aten::exp" for each in trace.events) == 2
    inside = [each.name for each in in_steps(trace)]
    assert [inside.count(f"aten::{name}") for name in ("sin", "cos", "exp")] == [
        4,
        4,
        0,
    ]
    parts = divide_all([trace])[0]
    assert all(each.share("data") > 0 for each in parts)


# ---- one profiler in a process ----


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def recorder(tmp_path: Path, notes: list[str]) -> Recorder:
    return Recorder(
        tmp_path / "profile",
        rank=0,
        device=torch.device("cpu"),
        sees_modules=True,
        note=notes.append,
    )


def test_a_second_profiler_is_refused_and_the_first_goes_on(
    recorder: Recorder, notes: list[str]
) -> None:
    assert recorder.start()
    recorder.begin_step(1)
    with (
        pytest.raises(
            RuntimeError, match="--profile or profile\\(\\) records on rank 0"
        ),
        torch.profiler.profile(),
    ):
        pass
    recorder.finish()
    assert notes == []
    assert recorder.folder is not None
    assert read_trace(recorder.folder / "rank-0.pt.trace.json.gz").steps[0].number == 1
    with torch.profiler.profile() as own:  # and afterwards it may
        torch.ones(3).exp()
    assert own.events()


@pytest.mark.parametrize("end", ["finish", "stop"])
def test_a_profiler_that_the_cell_has_ended_is_dropped(
    recorder: Recorder, notes: list[str], end: str
) -> None:
    """torch would crash the process where it writes what is no more."""
    assert recorder.start()
    recorder.begin_step(1)
    own = torch.profiler.profile()
    with pytest.raises(RuntimeError, match="cannot start"):
        own.start()
    own.stop()  # there is one session in a process: this ends it
    getattr(recorder, end)()
    assert not recorder.is_recording
    assert ["a profiler of the cell's own is active" in note for note in notes] == [
        True
    ]
    assert recorder.folder is not None
    assert not recorder.folder.exists()
    assert recorder.start()
    recorder.stop()


# ---- spans of time ----


def test_spans_are_united_intersected_and_subtracted() -> None:
    some = union([(5, 7), (0, 2), (1, 3)])
    assert some == [(0, 3), (5, 7)]
    assert both(some, [(2, 6)]) == [(2, 3), (5, 6)]
    assert without(some, [(1, 2), (6, 9)]) == [(0, 1), (2, 3), (5, 6)]


# ---- made by hand ----

MAIN, RUNLOOP = 1, 2


def event(name: str, began: float, ended: float, **more: Any) -> dict[str, Any]:
    kind = "cpu_op" if name.startswith(("aten", "c10d")) else "user_annotation"
    return {
        "ph": "X",
        "cat": more.pop("cat", kind),
        "name": name,
        "pid": 9,
        "tid": RUNLOOP if name.startswith("gloo") else MAIN,
        "ts": began,
        "dur": ended - began,
        "args": more,
    }


def made(
    rank: int,
    *events: dict[str, Any],
    steps: int = 3,
    ahead: float = 0,
    device: str = "cpu",
    on_core: int = 10**6,
    queued: int = 0,
    calls: Any = (),
) -> Trace:
    """A rank whose steps, of 1,000 us each, all have these events."""
    found = []
    for number in range(steps):
        start = 1_000.0 * number + ahead
        found += [{**each, "ts": each["ts"] + start} for each in events]
        found.append(event(f"ProfilerStep#{11 + number}", start, start + 1_000))
    noted = [
        [11 + n, int((1_000 * n + ahead) * 1_000), 0, 0, on_core, queued]
        for n in range(steps)
    ]
    facts = {"rank": rank, "device": device, "steps": noted, "calls": calls}
    return trace_of({"labkit": facts, "traceEvents": found})


def words(*traces: Trace, strategy: str = "ddp") -> list[str]:
    return why_slow(traces, divide_all(traces), strategy)


DIMS = {"Input Dims": [[1000]], "Input type": ["float"]}


def test_a_step_is_divided_into_parts() -> None:
    trace = made(
        0,
        event("labkit: next batch", 0, 100),
        event("aten::copy_", 50, 90),  # of the batch
        event("aten::mm", 100, 500),
        event("autograd::engine::evaluate_function: MmBackward0", 500, 900),
        event("aten::mm", 500, 700),
        event("c10d::allreduce_", 700, 720),
        event("gloo:all_reduce", 600, 800, **DIMS),
    )
    [step, *_] = divide_all([trace])[0]
    parts = {name: 1000 * step.share(name) for name in step.spans}
    assert parts == {"data": 100, "compute": 600, "communication": 100, "other": 200}
    assert (step.hidden, step.collective) == (100, 200)
    assert trace.messages[0].num_bytes == 4000


def test_a_collective_has_ended_when_the_optimizer_updates() -> None:
    """Gloo's thread has lost its core before it could note the end."""
    late = event("gloo:all_reduce", 600, 1_300, **DIMS)
    sent = event("gloo:send", 650, 1_350, **DIMS)
    trace = made(0, late, sent, event("Optimizer.step#SGD.step", 800, 900))
    end_before_updates(trace)
    assert [(each.kind, each.ended) for each in trace.messages[:3]] == [
        ("all_reduce", 800),
        ("send", 1_350),
        ("all_reduce", 1_800),
    ]


def test_clocks_are_compared_by_collectives() -> None:
    """A collective ends on none of the ranks before all have come to it."""
    meet = event("gloo:all_reduce", 400, 500, **DIMS)
    traces = [made(0, meet), made(1, meet), made(2, meet, ahead=5_000)]
    measure_offsets(traces)
    assert [each.offset for each in traces] == [0, 0, 5_000]
    assert traces[2].offset_error == 100


def test_ranks_of_two_groups_are_not_waited_for() -> None:
    """Pairs in step with each other, and one rank that is slow."""

    def rank(number: int, *, is_known: bool = True) -> Trace:
        comes = {0: 300, 1: 400, 2: 300, 3: 480}[number]
        pair = [number // 2 * 2, number // 2 * 2 + 1]
        calls = [["gloo:all_reduce", 1_000 * (n * 1_000 + comes), pair] for n in (0, 2)]
        return made(
            number,
            event("aten::mm", 0, comes),
            event("gloo:all_reduce", comes + 1, 500, **DIMS),
            event("aten::mm", 500, 990),
            calls=calls if is_known else (),
        )

    def waits(traces: list[Trace]) -> list[dict[int, float]]:
        return [dict(each[0].waits) for each in divide_all(traces).values()]

    traces = [rank(number) for number in range(4)]
    assert waits(traces) == [{1: 100}, {}, {3: 180}, {}]
    measure_offsets(traces)
    assert traces[1].offset_error == 149
    assert math.isnan(traces[2].offset_error)  # it shares no group with the first
    unknown = [rank(number, is_known=False) for number in range(4)]
    assert waits(unknown) == [{3: 180}, {3: 80}, {3: 180}, {}]


def test_a_rank_is_late_with_its_data() -> None:
    late = made(
        0,
        event("labkit: next batch", 0, 500),
        event("aten::mm", 500, 900),
        event("gloo:all_reduce", 900, 1_000, **DIMS),
    )
    other = made(
        1,
        event("labkit: next batch", 0, 10),
        event("aten::mm", 10, 410),
        event("gloo:all_reduce", 410, 1_000, **DIMS),
    )
    [reason] = words(late, other)
    assert reason == (
        "Rank 1 waits 49% of the step for rank 0's data loading: its next batch takes "
        "0.5 ms, that of rank 1 0.01 ms"
    )


@pytest.mark.parametrize(
    ("ours", "on_core", "queued", "cause"),
    [
        (
            [event("aten::mm", 0, 400), event("aten::exp", 400, 900)],
            *(900_000, 0, "1 more operators, most of it in aten::exp"),
        ),
        ([event("aten::mm", 0, 900)], 900_000, 0, "longer than the others, in as many"),
        (
            [event("aten::mm", 0, 900)],
            500_000,
            400_000,
            "waits 0.4 ms of each step for",
        ),
        ([event("aten::mm", 500, 900)], 400_000, 0, "sleeping, or waiting"),
        ([event("aten::mm", 500, 900)], 900_000, 0, "operators: running Python"),
    ],
)
def test_a_rank_is_late_for_a_cause(
    ours: Any, on_core: int, queued: int, cause: str
) -> None:
    end = event("gloo:all_reduce", 900, 1_000, **DIMS)
    late = made(1, *ours, end, on_core=on_core, queued=queued)
    early = event("gloo:all_reduce", 400, 1_000, **DIMS)
    other = made(0, event("aten::mm", 0, 400), early, on_core=400_000)
    [reason, *_] = words(other, late)
    assert reason.startswith("Rank 0 waits 50% of the step for rank 1")
    assert cause in reason


def test_ranks_that_wait_in_turns_are_not_blamed() -> None:
    def rank(number: int, *late: bool) -> Trace:
        facts = {
            "rank": number,
            "device": "cpu",
            "steps": [
                [11 + n, 1_000_000 * n, 0, 0, 10**6, 0] for n in range(len(late))
            ],
        }
        found = []
        for step, is_late in enumerate(late):
            start, come = 1_000 * step, 1_000 * step + (900 if is_late else 700)
            found += [
                event(f"ProfilerStep#{11 + step}", start, start + 1_000),
                event("aten::mm", start, come),
                event("gloo:all_reduce", come, start + 950, **DIMS),
            ]
        return trace_of({"labkit": facts, "traceEvents": found})

    assert words(rank(0, True, False, True), rank(1, False, True, False)) == []


def test_communication_that_is_not_hidden_is_named() -> None:
    def rank(number: int) -> Trace:
        big = {"Input Dims": [[2**20]], "Input type": ["float"]}
        return made(
            number,
            event("aten::mm", 0, 500),
            event("gloo:all_reduce", 500, 1_000, **big),
        )

    [reason] = words(rank(0), rank(1))
    assert reason.startswith("Communication is not hidden: 50% of the step")
    assert "all_reduce, 1 a step of up to 4 MiB: larger batches, --acc" in reason


def test_a_large_part_without_a_reason_is_named() -> None:
    """Where it sleeps, no sentence says why."""

    def said(computes: float) -> str:
        trace = made(0, event("aten::mm", 0, computes), on_core=int(1_000 * computes))
        parts = divide_all([trace])
        assert why_slow([trace], parts, "single") == []
        return without_reason(parts)

    held = "No reason holds in every recorded step; the largest part"
    assert said(200) == f"{held} is other (80% on average)"
    assert said(600) == f"{held} besides compute is other (40% on average)"
    assert said(900) == NOTHING


def test_advice_is_what_the_strategy_takes() -> None:
    big = {"Input Dims": [[2**20]], "Input type": ["float"]}
    ranks = [
        made(
            rank,
            event("aten::mm", 0, 500),
            event("gloo:all_reduce", 500, 1_000, **big),
        )
        for rank in range(2)
    ]
    said = {name: words(*ranks, strategy=name)[0] for name in ("ddp", "fsdp", "raw")}
    assert ["--comm" in each for each in said.values()] == [True, False, False]
    assert ["--accumulate" in each for each in said.values()] == [True, True, False]


def test_many_small_collectives_are_counted() -> None:
    def rank(number: int) -> Trace:
        small = [
            event("gloo:all_reduce", 500 + 20 * n, 510 + 20 * n, **DIMS)
            for n in range(16)
        ]
        return made(
            number, event("aten::mm", 0, 500), event("aten::mm", 820, 1000), *small
        )

    [reason] = words(rank(0), rank(1))
    assert reason.startswith("16 all_reduces a step of 3.91 KiB each")
    assert "bucket_cap_mb" in reason


@pytest.mark.parametrize("late", [False, True])
def test_small_collectives_that_cost_nothing_are_not_named(late: bool) -> None:
    """They are hidden beside a large one that is not, or a rank is waited for."""

    def rank(number: int) -> Trace:
        if late:
            busy = 49 if number else 20
            small = [
                each
                for n in range(0, 1_000, 50)
                for each in (
                    event("aten::mm", n, n + busy),
                    event("gloo:all_gather", n + busy, n + 49.5, **DIMS),
                )
            ]
            return made(number, *small, on_core=600_000)
        small = [event("gloo:broadcast", 20 * n, 20 * n + 9, **DIMS) for n in range(20)]
        large = event("gloo:all_reduce", 500, 900, **DIMS)
        return made(number, event("aten::mm", 0, 500), *small, large)

    found = words(rank(0), rank(1), strategy="fsdp")
    assert found
    assert not any("a step of 3.91 KiB each" in each for each in found)


def test_a_crowded_machine_is_named() -> None:
    ranks = [
        made(
            rank,
            event("aten::mm", 0, 900),
            event("gloo:all_reduce", 900, 950, **DIMS),
            on_core=600_000,
            queued=300_000,
        )
        for rank in range(2)
    ]
    [reason] = words(*ranks)
    assert reason.startswith("Ranks wait 30% of the step for a core")


def test_a_sleep_is_not_called_python() -> None:
    def reasons(on_core: int) -> list[str]:
        slow = made(0, event("aten::mm", 0, 100), on_core=on_core)
        return words(slow, strategy="single")

    assert reasons(100_000) == []
    [reason] = reasons(1_000_000)
    assert reason.startswith("90% of the step is Python outside of operators")


def test_messages_are_waited_for() -> None:
    def rank(number: int) -> Trace:
        return made(
            number,
            event("gloo:send", 0, 1_000, **DIMS),
            event("aten::mm", 0, 500),
            event("gloo:recv", 100, 900, **DIMS),
            on_core=600_000,
        )

    [reason] = words(rank(0), rank(1), strategy="pipeline")
    assert reason == (
        "Ranks wait 40% of the step for messages of other ranks: more --microbatches "
        "keep ranks busy"
    )


def test_short_kernels_are_counted() -> None:
    """As a GPU's trace has them; none was recorded on one."""
    kernels = [
        event("gemm", 100 + 8 * n, 104 + 8 * n, cat="kernel", device=0, stream=7)
        for n in range(60)
    ]
    [reason] = words(made(0, *kernels, device="cuda:0"), strategy="single")
    assert reason.startswith("Rank 0 runs 60 kernels a step of 4 µs each")


def test_kernels_are_measured_beside_their_launches_and_the_peak() -> None:
    """As a GPU's trace has them, by its documented fields; none was recorded on one."""
    launch = event("cudaLaunchKernel", 90, 95, cat="cuda_runtime", correlation=7)
    kernel = event("gemm", 100, 600, cat="kernel", correlation=7)
    product = event("aten::addmm", 80, 96, **{"Input Dims": [[9], [64, 32], [32, 16]]})
    trace = made(0, launch, kernel, product, device="cuda:0", steps=1)
    trace.device_name = "NVIDIA H100 80GB HBM3"
    table = kernels([trace], divide_all([trace]))
    found = table.loc[0].to_dict()
    assert found.pop("tflops") == pytest.approx(2 * 64 * 32 * 16 / 1e-3 / 1e12)
    assert found.pop("mfu") == pytest.approx(2 * 64 * 32 * 16 / 1e-3 / 989e12)
    assert found == {"kernels": 1, "mean_us": 500, "launch_gap_us": 10, "idle": 0.5}
    assert peak_of("Some GPU") is None
    assert kernels([made(0, steps=1)], divide_all([made(0, steps=1)])).empty


@pytest.mark.parametrize(
    "content",
    [  # packed in the test: the last takes two seconds, and each worker collects it
        lambda: b"no gzip",
        lambda: gzip.compress(b"no JSON"),
        lambda: gzip.compress(b"[]"),
        lambda: gzip.compress(b'{"labkit": 1, "traceEvents": 2}'),
        lambda: gzip.compress(
            b'{"labkit": {"rank": 0, "steps": []}, "traceEvents": []}'
        ),
        lambda: gzip.compress(b"[" * 10**6),
        lambda: gzip.compress(b" " * (MAX_BYTES + 1), compresslevel=1),
    ],
    ids=range(7),
)
def test_what_is_no_trace_is_refused(
    content: Callable[[], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "rank-0.pt.trace.json.gz"
    path.write_bytes(content())
    with pytest.raises(ValueError, match=r"trace|damaged|unpacked|Expecting"):
        read_trace(path)


# ---- real runs ----

CODE = """
import time
from torch import nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from labkit.data import digits

class Slow(Dataset):
    def __init__(self, seconds):
        self.digits, self.seconds = digits(), seconds
    def __len__(self):
        return 16 * 32
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.digits[index]

def train(loss_of=lambda loss: None, seconds=0.0, depth=3):
    layers = [nn.Flatten(), nn.Linear(64, 256)]
    for _ in range(depth):
        layers += [nn.ReLU(), nn.Linear(256, 256)]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(model, optimizer, Slow(seconds), batch_size=32)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        loss_of(x)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))


def profiled(lab: Lab, code: str, strategy: str = "ddp", **options: Any) -> Run:
    return lab.train(strategy, CODE + code, profile=True, live=False, **options)


def test_slow_data_on_one_rank_is_named(lab: Lab) -> None:
    reasons = profiled(lab, "train(seconds=0.002 if rank == 1 else 0)").profile.reasons
    assert re.match(r"Rank 0 waits \d+% of the step for rank 1's data", reasons[0])


def test_slow_computing_on_one_rank_is_named(lab: Lab) -> None:
    code = """
a = torch.randn(700, 700)
def more(x):
    if rank == 0:
        for _ in range(10):
            a.mm(a)
train(more)
"""
    reasons = profiled(lab, code).profile.reasons
    # On a busy machine they may wait for a core as well.
    [reason] = [each for each in reasons if each.startswith("Rank 1 waits ")]
    assert "% of the step for rank 0, which computes " in reason
    assert "more operators, most of it in aten::mm" in reason


IN_NAMED_BLOCKS = """
kind = torch.profiler.record_function
enter, entered = kind.__enter__, []
kind.__enter__ = lambda mark: entered.append(mark.name) or enter(mark)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, sgd, digits(), batch_size=64)
def gathers():
    entered.clear()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [each for each in entered if each.startswith("FSDP::all_gather (")]
without = gathers()
with torch.profiler.profile():
    within = gathers()
"""


def test_fsdp_names_what_it_does_only_for_a_profiler(lab: Lab) -> None:
    lab.train("fsdp", CODE + IN_NAMED_BLOCKS, live=False)
    lab.run("after = gathers()\nkind.__enter__ = enter")
    found = [lab.pull(name, 0) for name in ("without", "within", "after")]
    assert [bool(names) for names in found] == [False, True, True]


def test_a_rank_that_sleeps_is_named(lab: Lab) -> None:
    run = profiled(lab, "train(lambda x: time.sleep(0.2 * rank))")
    [reason, *_] = run.profile.reasons
    assert reason.startswith("Rank 0 waits ")
    assert "for rank 1, which spends " in reason
    assert reason.endswith("waiting for a file, a lock or another process")


def test_a_large_payload_is_named(lab: Lab) -> None:
    code = "b = torch.ones(2**22)\ntrain(lambda x: dist.all_reduce(b))"
    reasons = " ".join(profiled(lab, code).profile.reasons)
    assert "Communication is not hidden" in reasons
    assert "most of it is all_reduce" in reasons
    assert "of up to 16 MiB" in reasons


@pytest.mark.long
def test_a_small_bucket_is_named(lab: Lab) -> None:
    config = {"bucket_cap_mb": 0.001}
    reasons = " ".join(profiled(lab, "train(depth=20)", config=config).profile.reasons)
    assert re.search(r"\d\d all_reduces a step of \d+ KiB each", reasons)
    assert "bucket_cap_mb" in reasons


def test_what_is_recorded_can_be_opened(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = profiled(lab, "train()")
    profile = run.profile
    assert not any(cause in repr(profile) for cause in ("data loading", "bucket_cap"))
    assert list(profile.steps["step"]) == [11, 12, 13, 11, 12, 13]
    assert profile.operators["operator"].str.contains("aten::addmm").any()
    assert profile.modules["module"].iloc[0] == "model (Sequential)"
    assert (profile.modules["backward_ms"].head(1) > 0).all()
    assert profile.allocations["rank"].nunique() == 2
    assert profile.allocations["allocated_bytes"].max() > 0
    assert set(profile.memory["step"]) == {14}  # the first one that is not recorded
    assert profile.memory["parameters"].max() > 0
    assert re.search(
        r"memory: at most \S+ \S+ in step 14, in the backward pass", repr(profile)
    )
    assert (profile.clocks["offset"] == 0).all()
    lanes, memory = profile.plot().axes
    assert lanes.get_title(loc="left").startswith(run.name)
    assert "step 14" in memory.get_title(loc="left")
    shown: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr("IPython.display.display", lambda what, **_: shown.append(what))
        profile._ipython_display_()
    words, picture, links = shown
    assert words["text/plain"] == repr(profile)
    assert picture["text/plain"] == f"<lanes of {run.name} by rank>"
    assert picture["image/png"].startswith(b"\x89PNG")
    assert "ui.perfetto.dev" in links["text/html"]
    with gzip.open(profile.trace_path) as file:
        merged = json.load(file)
    names = [
        each["args"]["name"]
        for each in merged["traceEvents"]
        if each["name"] == "process_name"
    ]
    assert names == ["rank 0 (cpu)", "rank 1 (cpu)"]
    # The same after the run is loaded from disk.
    assert repr(labkit.load_run(run.name).profile) == repr(profile)
    # labkit's own measurements are in none of the recorded steps.
    assert set(range(10, 14)).isdisjoint(
        each.step for each in run.collector.measurements[0]
    )


BLOCK = """
def look(x):
    if number == 5:
        with profile():
            x.exp()
            dist.all_reduce(torch.ones(4))
            {more}
number = 0
def counted(x):
    global number
    number += 1
    look(x)
train(counted)
"""


def test_a_block_is_recorded_as_a_step(lab: Lab) -> None:
    code = CODE + BLOCK.format(more="")
    profile = lab.train("ddp", code, live=False).profile
    assert list(profile.steps["step"]) == [5, 5]
    assert re.search(r": step 5, [\d.]+ ms(,|\n)", repr(profile))
    assert "aten::exp" in set(profile.operators["operator"])
    assert "aten::addmm" not in set(profile.operators["operator"])


def test_a_block_in_which_nothing_runs_says_so(lab: Lab) -> None:
    run = lab.train("raw", "with profile():\n    sum(range(10_000))", live=False)
    said = repr(run.profile)
    assert "No operator of torch ran in what was recorded" in said
    assert "larger batches" not in said


EVERY_STEP = """
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    with profile():
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_blocks_that_are_not_kept_are_noted(lab: Lab) -> None:
    """And labkit's own profiler is none that is in its way."""
    run = lab.train("raw", CODE + EVERY_STEP, live=False)
    own = [note for note in run.notes if "profile" in note]
    kept = "of 4 blocks the last one is kept: a run has one profile"
    assert own == [f"profile(): {kept}"]


PAIRS = """
groups = [dist.new_group([0]), dist.new_group([0, 1])]
t = torch.ones(3)
def both(x):
    dist.all_reduce(t)
    dist.all_reduce(t, group=groups[1])
    dist.all_reduce(torch.ones(2), group=groups[0]) if rank == 0 else None
train(both)
"""


def test_collectives_are_known_by_their_group(lab: Lab) -> None:
    profile = profiled(lab, PAIRS).profile
    traces = [read_trace(path) for path in sorted(profile.folder.glob("rank-*"))]
    own = [trace.messages for trace in traces]
    assert {each.ranks for each in own[0]} == {(0,), (0, 1)}
    assert {each.ranks for each in own[0] if each.shape == "[[2]]"} == {(0,)}
    assert {each.ranks for each in own[1]} == {(0, 1)}


MEET = """
import time
from pathlib import Path
flag = Path({flag!r})
if rank == 1:
    time.sleep(0.3)
    flag.touch()
with profile():
    assert flag.exists(), "rank 0 has begun before rank 1 came"
    torch.ones(3).exp()
"""


def test_all_ranks_meet_before_a_block(lab: Lab, tmp_path: Path) -> None:
    """Also those that share no batch, as stages do."""
    code = MEET.format(flag=str(tmp_path / "flag"))
    assert lab.train("pipeline", code, live=False).has_profile


def test_a_block_within_recorded_steps_is_refused(lab: Lab) -> None:
    code = CODE + BLOCK.format(more="")
    with pytest.raises(RuntimeError, match="profiler is active in this process alr"):
        lab.train("ddp", code, profile="5-6", live=False)
    lab.run("assert not torch.autograd._profiler_enabled()")


def test_a_block_that_fails_leaves_no_profiler(lab: Lab) -> None:
    code = CODE + BLOCK.format(more="1 / 0")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        lab.train("ddp", code, live=False)
    lab.run("assert not torch.autograd._profiler_enabled()")
    with pytest.raises(RuntimeError, match="and profile belong to a training run"):
        lab.run("profile()")


def test_a_run_that_is_too_short_says_so(lab: Lab) -> None:
    run = profiled(lab, "pass")
    assert (
        "the run ended after 0 steps, and step 11 was to be the first" in run.notes[0]
    )
    with pytest.raises(ValueError, match="has no profile; run it again with --profile"):
        _ = run.profile


def test_a_failure_leaves_no_profiler(lab: Lab) -> None:
    code = """
steps = 0
def fail(x):
    global steps
    steps += 1
    if steps == 12 and rank == 1:
        raise RuntimeError("on purpose")
train(fail)
"""
    with pytest.raises(RuntimeError, match="on purpose"):
        profiled(lab, code)
    run = lab.runs[-1]
    assert any("nothing is kept of them" in note for note in run.notes)
    assert not list(Path(str(run.folder)).glob("profile/*"))
    lab.run("assert not torch.autograd._profiler_enabled()")
    assert profiled(lab, "train()").profile.reasons is not None


def test_a_profiler_of_the_cells_own_is_left_alone(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
with torch.profiler.profile() as own:
    train()
assert own.events()
"""
    run = profiled(lab, code)
    assert any("a profiler of the cell's own is active" in note for note in run.notes)
    assert "USDT" not in capfd.readouterr().err  # as the first one of a process says


RAW = """
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(Slow(0.0), batch_size=16):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_raw_loop_is_recorded_by_its_steps(lab: Lab) -> None:
    run = profiled(lab, RAW, "raw")
    assert list(run.profile.steps["step"]) == [11, 12, 13, 11, 12, 13]
    assert (run.profile.steps["compute"] > 0).all()


FIT = """
from labkit.models import GPT, next_token_loss
from labkit.data import text
from torch.utils.data import Subset
model = GPT(256, context=32, dim=32, num_layers=4)
data = Subset(text(block_size=32), range(16 * 16))
optimizer = torch.optim.AdamW(model.parameters())
fit(model, data, next_token_loss, optimizer=optimizer, batch_size=16)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy",
    in_suites(
        [name for name in STRATEGIES if name != "raw"],
        test=[],
        long=["fsdp"],
    ),
)
def test_every_strategy_is_recorded(lab: Lab, strategy: str) -> None:
    profile = profiled(lab, FIT, strategy).profile
    assert set(profile.steps["step"]) == {11, 12, 13}
    assert (profile.steps["compute"] > 0.02).all()
    assert "data loading" not in repr(profile)
    for path in profile.folder.glob("rank-*"):
        assert read_trace(path).clock_error < 1_000
