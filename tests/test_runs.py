import math
import re
from collections.abc import Sequence

import numpy as np
import pytest

from labkit.notebook.history import pace
from labkit.notebook.history.collector import Collector
from labkit.notebook.runs.catalog import list_runs
from labkit.notebook.runs.comparison import compare_runs
from labkit.notebook.runs.run import Run
from labkit.records import NO_STEPS
from labkit.records import RECORD
from labkit.records import Batch
from labkit.records import Note
from labkit.records import Progress


def make_run(
    losses: dict[int, Sequence[float]],
    *,
    seconds_a_step: float = 0.5,
    progress: Progress | None = None,
    sequence: int = 0,
) -> Run:
    """A run in which each rank logged these losses, at steps 1, 2, ..."""
    collector = Collector(list(losses))
    for rank, values in losses.items():
        rows = [
            (0, step, 1 + seconds_a_step * step, step * 2**20, value)
            for step, value in enumerate(values, 1)
        ]
        records = np.array(rows, dtype=RECORD)
        collector.add(rank, Batch(sequence, ["loss"], records))
        collector.progress[rank] = progress or Progress()
    return Run("run-1", "ddp", "the code", collector)


EMPTY: dict[int, Sequence[float]] = {0: [], 1: []}


def test_that_there_are_no_steps_is_noted_where_no_rank_has_any() -> None:
    for losses, notes in (EMPTY, [NO_STEPS]), ({0: [1.0], 1: []}, []):
        run = make_run(losses)
        run.collector.add_report(1, Note(NO_STEPS))
        assert run.notes == notes


# ---- loss ----


def test_a_step_that_not_all_ranks_came_to_has_no_mean_loss() -> None:
    run = make_run({0: [3.0, 2.0, 9.0], 1: [1.0, 2.0]})
    for state in ("running", "failed", "interrupted"):
        run.state = state
        assert list(run.mean_loss()["loss"]) == [2.0, 2.0]
        assert run.last_loss == 2.0
    run.state = "finished"  # with a rank that took more steps, as its cell says
    assert list(run.mean_loss()["loss"]) == [2.0, 2.0, 9.0]
    # Ranks that never log a loss are not waited for.
    assert list(make_run({0: [3.0, 2.0], 1: []}).mean_loss()["loss"]) == [3.0, 2.0]
    assert make_run(EMPTY).mean_loss().empty


@pytest.mark.parametrize("state", ["finished", "failed"])
@pytest.mark.parametrize(
    "losses",
    [
        EMPTY,
        {0: [3.0, 2.0], 1: []},
        {0: [3.0, 2.0, 9.0], 1: [1.0, 4.0]},
        {0: [3.0, 2.0, math.nan], 1: [1.0, math.nan]},
        {0: [3.0, math.inf], 1: [1.0, 2.0]},
        {0: [math.nan], 1: [math.nan]},
    ],
)
def test_the_last_loss_is_that_of_the_last_mean(
    losses: dict[int, Sequence[float]], state: str
) -> None:
    run = make_run(losses)
    run.state = state
    means = run.mean_loss()["loss"]
    wanted = means.iloc[-1] if len(means) else math.nan
    assert run.last_loss == pytest.approx(wanted, nan_ok=True)


# ---- repr ----


def test_repr_says_what_ran_and_how_it_ended() -> None:
    run = make_run({0: [3.0, 2.0], 1: [3.0, 2.0, 1.0]})
    run.end("finished")
    assert repr(run) == "<Run 'run-1': ddp on 2 ranks, finished, 3 steps>"


def test_repr_of_one_rank_and_one_step_is_english() -> None:
    run = make_run({0: [1.0]})
    assert repr(run) == "<Run 'run-1': ddp on 1 rank, running>"
    run.end("finished")
    assert repr(run) == "<Run 'run-1': ddp on 1 rank, finished, 1 step>"


def test_repr_holds_nothing_that_differs_from_run_to_run() -> None:
    first = make_run({0: [3.0, 2.0], 1: [3.5, 2.5]}, seconds_a_step=0.1)
    second = make_run({0: [9.0, float("nan")], 1: [1.0, 0.5]}, seconds_a_step=7.0)
    first.end("finished")
    second.end("finished")
    second.seconds = 99.0
    assert repr(first) == repr(second)


# ---- state and time ----


@pytest.mark.parametrize("state", ["finished", "failed", "interrupted"])
def test_a_run_that_ended_keeps_how_long_it_took(state: str) -> None:
    run = make_run(EMPTY)
    assert run.state == "running"
    assert 0 <= run.elapsed() <= run.elapsed()
    run.end(state)
    assert run.state == state
    assert run.elapsed() == run.elapsed() == run.seconds


def test_another_thread_sees_the_state_of_a_run_after_its_numbers() -> None:
    class Seen(Run):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if value == "failed":
                assert (self.seconds, self.info) == (3.0, {"began": 1.0})
                assert self.mismatches == ["a mismatch"]

    run = Seen("run-1", "ddp", "", Collector([0]))
    info = {"began": 1.0}
    run.catch_up("failed", seconds=3.0, info=info, mismatches=["a mismatch"])
    assert run.has_ended.is_set()


def test_a_run_that_cannot_catch_up_is_as_it_was() -> None:
    run = make_run(EMPTY)
    run.catch_up("lost", seconds=3.0, info={"began": 1.0}, mismatches=[])
    with pytest.raises(KeyError, match="began"):
        run.catch_up("running", seconds=4.0, info={}, mismatches=[])
    assert (run.state, run.seconds, run.info) == ("lost", 3.0, {"began": 1.0})


def test_world_size_counts_the_ranks_of_the_run() -> None:
    assert make_run({0: [1.0]}).world_size == 1
    assert make_run({0: [], 1: [], 2: []}).world_size == 3


def test_steps_a_second_are_measured_between_the_first_and_last_step() -> None:
    run = make_run({0: [1.0] * 11}, seconds_a_step=0.25)
    assert run.steps_per_s() == pytest.approx(4.0)


@pytest.mark.parametrize("steps", [[1], [1, 1, 2, 4, 4, 5, 9, 9], [4, 4, 1, 2, 2, 9]])
def test_seconds_of_a_step_lie_between_first_records(
    steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks divide them, and where `log(step=)` goes back."""
    monkeypatch.setattr(pace, "_BLOCK_RECORDS", 3)
    records = np.zeros(len(steps), RECORD)
    records["step"] = steps
    records["seconds"] = np.arange(len(steps)) ** 2
    collector = Collector([0])
    collector.add(0, Batch(0, ["loss"], records))
    distinct, first = np.unique(steps, return_index=True)
    wanted = np.diff(records["seconds"][first]) / np.diff(distinct)
    assert pace.step_seconds(collector, 0).tolist() == wanted.tolist()


def test_steps_a_second_are_those_of_the_slowest_rank() -> None:
    run = make_run({0: [1.0] * 3, 1: [1.0] * 3})
    run.collector.records(1)["seconds"] *= 2
    assert run.steps_per_s() == pytest.approx(1.0)


@pytest.mark.parametrize("losses", [EMPTY, {0: [1.0], 1: [1.0]}])
def test_steps_a_second_are_unknown_before_the_second_step(
    losses: dict[int, Sequence[float]],
) -> None:
    assert make_run(losses).steps_per_s() is None


# ---- summary ----


def test_summary_has_a_row_for_each_rank() -> None:
    run = make_run({0: [3.0, 2.0, 1.0], 1: [5.0, 4.0]})
    run.end("finished")
    summary = run.summary()
    assert summary.index.name == "rank"
    assert summary.to_dict("index") == {
        0: {
            "steps": 3,
            "first_loss": 3.0,
            "last_loss": 1.0,
            "seconds": run.seconds,
            "steps_per_s": pytest.approx(2.0),
            "peak_memory_mib": 3.0,
            "behind": pytest.approx(float("nan"), nan_ok=True),
        },
        1: {
            "steps": 2,
            "first_loss": 5.0,
            "last_loss": 4.0,
            "seconds": run.seconds,
            "steps_per_s": pytest.approx(2.0),
            "peak_memory_mib": 2.0,
            "behind": pytest.approx(float("nan"), nan_ok=True),
        },
    }


def test_summary_has_the_peak_of_memory_not_the_last() -> None:
    run = make_run({0: [1.0, 1.0, 1.0]})
    run.collector.records(0)["memory_bytes"] = [2**20, 9 * 2**20, 2**20]
    assert run.summary().loc[0, "peak_memory_mib"] == 9.0


def test_summary_of_an_empty_run_has_no_numbers() -> None:
    summary = make_run(EMPTY).summary()
    assert list(summary.index) == [0, 1]
    assert list(summary["steps"]) == [0, 0]
    assert summary.drop(columns=["steps", "seconds"]).isna().all(axis=None)


def test_seconds_and_steps_a_second_mean_the_same_everywhere() -> None:
    run = make_run({0: [1.0] * 21, 1: [1.0] * 21}, seconds_a_step=0.25)
    run.collector.records(1)["seconds"] *= 2  # and is the slowest
    run.end("finished")
    run.seconds = 59.5  # with what comes before the first step and after the last
    run.info["began"] = 0.0
    [row] = compare_runs([run]).to_dict("records")
    [listed] = list_runs("no folder", own=[run]).to_dict("records")
    assert list(run.summary()["steps_per_s"]) == pytest.approx([4.0, 2.0])
    assert list(run.summary()["seconds"]) == [59.5, 59.5]
    for table in (row, listed):
        assert table["steps_per_s"] == pytest.approx(run.steps_per_s()) == 2.0
        assert table["seconds"] == 59.5
    assert "2 steps/s" in run.status_line()
    assert "59.5 s" in run.status_line()


def test_history_is_that_of_the_collector() -> None:
    run = make_run({0: [1.0], 1: [2.0]})
    assert run.history.equals(run.collector.history())


# ---- status line ----


def test_status_of_a_loop_of_unknown_length_counts_steps() -> None:
    assert make_run(EMPTY).status_line() == "run-1: ddp on 2 ranks, step 0"
    run = make_run({0: [1.0] * 5})
    assert run.status_line() == "run-1: ddp on 1 rank, step 5, 2 steps/s"


def test_status_of_a_loop_of_known_length_tells_when_it_ends() -> None:
    progress = Progress(epoch=2, epochs=3, steps_per_epoch=10)
    run = make_run({0: [1.0] * 15}, progress=progress)
    assert run.status_line() == (
        "run-1: ddp on 1 rank, epoch 2/3, step 15/30, 2 steps/s, 8 s left"
    )


def test_status_with_an_unknown_number_of_epochs_counts_within_the_epoch() -> None:
    progress = Progress(epoch=3, steps_per_epoch=10)
    run = make_run({0: [1.0] * 24}, progress=progress)
    assert run.status_line() == (
        "run-1: ddp on 1 rank, epoch 3, step 4/10 of the epoch, 2 steps/s"
    )


def test_status_of_a_run_that_ended_has_its_time_and_no_time_left() -> None:
    progress = Progress(epoch=1, epochs=1, steps_per_epoch=10)
    run = make_run({0: [1.0] * 5}, progress=progress)
    run.end("interrupted")
    run.seconds = 12.345
    assert run.status_line() == (
        "run-1: ddp on 1 rank, interrupted, epoch 1/1, step 5/10, 2 steps/s, 12.3 s"
    )


def test_status_tells_of_lost_records() -> None:
    run = make_run({0: [1.0]}, sequence=2)
    assert run.status_line().endswith(", 2 records lost")
    assert "lost" not in make_run({0: [1.0]}).status_line()


def test_status_never_promises_negative_time() -> None:
    progress = Progress(epoch=2, epochs=2, steps_per_epoch=4)
    run = make_run({0: [1.0] * 10}, progress=progress)
    [left] = re.findall(r"(\S+) s left", run.status_line())
    assert math.isclose(float(left), 0.0)
    assert not left.startswith("-")
