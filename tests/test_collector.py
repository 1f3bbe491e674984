from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.notebook.history.collector import Collector
from labkit.notebook.history.curves import MEMORY
from labkit.records import NOTICED_LOSS
from labkit.records import PROGRESS
from labkit.records import RECORD
from labkit.records import STEP_TAKEN
from labkit.records import Batch
from labkit.records import Progress

Logged = tuple[str, int, float]
LEADING = ["step", "rank", "seconds", "loss", "memory_bytes"]


def batch(
    *logged: Logged, sequence: int = 0, names: Sequence[str] = ("loss", "accuracy")
) -> Batch:
    """(metric, step, value) each, logged a second apart, with 100 bytes a step."""
    names = list(dict.fromkeys([*names, *(name for name, *_ in logged)]))
    rows = [
        (names.index(name), step, float(at), 100 * step, value)
        for at, (name, step, value) in enumerate(logged)
    ]
    return Batch(sequence, names, np.array(rows, dtype=RECORD))


def collect(*batches: tuple[int, Batch], ranks: Sequence[int] = (0, 1)) -> Collector:
    collector = Collector(ranks)
    for rank, each in batches:
        collector.add(rank, each)
    return collector


def rows(frame: pd.DataFrame, *columns: str) -> list[tuple]:
    """Rows with None in place of NaN, which equals nothing."""
    wanted = frame[list(columns)].astype(object)
    return list(wanted.where(wanted.notna(), None).itertuples(index=False, name=None))


def test_a_long_history_is_not_copied_as_it_grows() -> None:
    """Copies that are given up take as much memory again while they are made."""
    collector, many = Collector([0]), np.zeros(2**20 + 1, RECORD)
    collector.add(0, Batch(0, ["loss"], many))
    before = collector.records(0)
    for sequence in range(len(many), 4 * len(many), len(many)):
        collector.add(0, Batch(sequence, ["loss"], many))
    assert len(collector.records(0)) == 4 * len(many)
    assert np.shares_memory(collector.records(0), before)


# ---- history ----


def test_history_has_one_row_a_rank_and_step_in_order() -> None:
    collector = collect(
        (1, batch(("loss", 1, 11.0), ("loss", 2, 12.0))),
        (0, batch(("loss", 1, 1.0))),
        (0, batch(("loss", 2, 2.0), sequence=1)),
    )
    history = collector.history()
    assert list(history.columns) == LEADING
    assert rows(history, "step", "rank", "loss") == [
        (1, 0, 1.0),
        (1, 1, 11.0),
        (2, 0, 2.0),
        (2, 1, 12.0),
    ]
    assert list(history.index) == [0, 1, 2, 3]


def test_history_keeps_when_and_with_how_much_memory_it_was_logged() -> None:
    collector = collect((0, batch(("loss", 1, 0.5), ("loss", 2, 0.4))), ranks=[0])
    assert rows(collector.history(), "seconds", "memory_bytes") == [
        (0.0, 100),
        (1.0, 200),
    ]


def test_metrics_follow_the_leading_columns() -> None:
    collector = collect(
        (0, batch(("accuracy", 1, 0.5), ("loss", 1, 2.0), ("lr", 1, 0.1))),
        (1, batch(("lr", 1, 0.2), ("grad_norm", 1, 7.0))),
    )
    history = collector.history()
    assert list(history.columns[:5]) == LEADING
    assert set(history.columns[5:]) == {"accuracy", "lr", "grad_norm"}
    assert rows(history, "rank", "loss", "accuracy", "lr", "grad_norm") == [
        (0, 2.0, 0.5, 0.1, None),
        (1, None, None, 0.2, 7.0),
    ]


def test_ranks_may_have_their_metrics_in_different_order() -> None:
    collector = collect(
        (0, batch(("a", 1, 1.0), ("b", 1, 2.0), names=["a", "b"])),
        (1, batch(("b", 1, 3.0), ("a", 1, 4.0), names=["b", "a"])),
    )
    assert rows(collector.history(), "rank", "a", "b") == [(0, 1.0, 2.0), (1, 4.0, 3.0)]


def test_a_metric_may_be_logged_at_other_steps_than_the_loss() -> None:
    collector = collect(
        (0, batch(("loss", 1, 3.0), ("loss", 2, 2.0), ("accuracy", 3, 0.9))),
        ranks=[0],
    )
    assert rows(collector.history(), "step", "loss", "accuracy") == [
        (1, 3.0, None),
        (2, 2.0, None),
        (3, None, 0.9),
    ]


def test_a_metric_that_is_logged_twice_at_a_step_keeps_both() -> None:
    collector = collect(
        (0, batch(("loss", 1, 3.0), ("accuracy", 1, 0.1), ("accuracy", 1, 0.2))),
        (0, batch(("accuracy", 1, 0.3), sequence=3)),
        (1, batch(("loss", 1, 5.0))),
    )
    assert rows(collector.history(), "step", "rank", "loss", "accuracy") == [
        (1, 0, 3.0, 0.1),
        (1, 0, None, 0.2),
        (1, 0, None, 0.3),
        (1, 1, 5.0, None),
    ]


def test_nan_is_a_value_that_history_keeps() -> None:
    collector = collect((0, batch(("loss", 1, float("nan")), ("loss", 2, 1.0))))
    assert rows(collector.history(), "step", "loss") == [(1, None), (2, 1.0)]


def test_a_run_without_records_has_an_empty_history() -> None:
    history = Collector([0, 1]).history()
    assert list(history.columns) == LEADING
    assert len(history) == 0


def test_a_rank_without_records_is_left_out_of_history() -> None:
    collector = collect((1, batch(("loss", 1, 0.5))))
    assert rows(collector.history(), "step", "rank", "loss") == [(1, 1, 0.5)]


def test_columns_of_history_are_numbers() -> None:
    collector = collect(
        (0, batch(("loss", 1, 0.5))), (1, batch(("accuracy", 1, 0.5))), ranks=[0, 1, 2]
    )
    kinds = collector.history().dtypes.map(lambda dtype: dtype.kind)
    assert dict(kinds) == {
        "step": "i",
        "rank": "i",
        "seconds": "f",
        "loss": "f",
        "memory_bytes": "i",
        "accuracy": "f",
    }


# ---- by rank ----


def test_series_holds_one_metric_in_the_order_of_logging() -> None:
    collector = collect(
        (0, batch(("loss", 1, 3.0), ("accuracy", 1, 0.1))),
        (0, batch(("loss", 2, 2.0), sequence=2)),
    )
    series = collector.series(0, "loss")
    assert series["step"].tolist() == [1, 2]
    assert series["value"].tolist() == [3.0, 2.0]
    assert series.dtype == RECORD


def test_series_of_an_unknown_metric_is_empty() -> None:
    collector = collect((0, batch(("loss", 1, 3.0))))
    assert len(collector.series(0, "nothing")) == 0
    assert len(collector.series(1, "loss")) == 0


def test_records_can_be_read_between_two_batches() -> None:
    collector = Collector([0])
    for sequence in range(3):
        collector.add(0, batch(("loss", sequence, 0.0), sequence=sequence))
        assert collector.records(0)["step"].tolist() == list(range(sequence + 1))
    assert collector.num_records == {0: 3}


def test_notes_of_progress_are_no_part_of_the_history() -> None:
    collector = collect(
        (0, batch((PROGRESS["epoch"], 0, 1.0), ("loss", 1, 3.0))),
        (0, batch((PROGRESS["epoch"], 1, 2.0), sequence=2)),
        (0, batch((PROGRESS["epochs"], 1, 5.0), sequence=3)),
    )
    assert collector.progress == {0: Progress(epoch=2, epochs=5), 1: Progress()}
    assert collector.steps == {0: 1, 1: 0}
    assert collector.num_records == {0: 1, 1: 0}
    assert collector.num_received == {0: 4, 1: 0}
    assert collector.num_lost == 0
    assert list(collector.history().columns) == LEADING
    assert collector.records(0)["step"].tolist() == [1]


def test_steps_are_those_that_were_taken_where_they_are_noticed() -> None:
    collector = Collector([0, 1, 2])
    collector.add(0, batch(("mine", 7, 0.0), ("mine", 3, 0.0)))
    collector.add(1, batch(("mine", 700, 0.0), (NOTICED_LOSS, 2, 0.5)))
    collector.add(1, batch(("mine", 900, 0.0), sequence=2))
    collector.add(2, batch((STEP_TAKEN, 1, 1.0), (STEP_TAKEN, 2, 2.0)))
    assert collector.steps == {0: 7, 1: 2, 2: 2}
    assert collector.num_records == {0: 2, 1: 3, 2: 2}


def test_a_step_without_a_loss_has_its_memory() -> None:
    collector = Collector([0, 1])
    # Of two optimizers.
    steps = [(STEP_TAKEN, step, float(step)) for step in (1, 1, 2, 2)]
    collector.add(0, batch(*steps))
    noticed = (NOTICED_LOSS, 1, 0.5), (NOTICED_LOSS, 2, 0.25)
    collector.add(1, batch(*noticed, names=()))
    history = collector.history()
    assert list(history.columns) == LEADING
    assert history["rank"].tolist() == [0, 1, 0, 1]
    assert history["memory_bytes"].notna().all()
    assert history["loss"].isna().tolist() == [True, False] * 2
    collector.curves.update(is_final=True)
    for rank in (0, 1):
        assert collector.curves.curve(rank, MEMORY).num_values == 2
    assert not collector.curves.metrics()


# ---- losses ----


def test_records_that_never_came_are_counted() -> None:
    collector = Collector([0, 1])
    for sequence in (0, 1, 4, 5, 7):
        collector.add(0, batch(("loss", sequence, 0.0), sequence=sequence))
    collector.add(1, batch(("loss", 1, 0.0), sequence=1))
    collector.finish(0, 10)
    collector.finish(1, 2)
    assert collector.lost == {0: 2 + 1 + 2, 1: 1}
    assert collector.num_lost == 6


def test_no_record_is_missing_where_all_came() -> None:
    collector = Collector([0, 1])
    for sequence in range(5):
        for rank in (1, 0):
            collector.add(rank, batch(("loss", sequence, 0.0), sequence=sequence))
    for rank in (0, 1):
        collector.finish(rank, 5)
    assert collector.num_lost == 0
