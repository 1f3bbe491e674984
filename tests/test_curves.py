"""Curves that are thinned as they grow, against the whole history."""

import threading
import tracemalloc

import numpy as np
import pytest

from labkit.notebook.history import curves
from labkit.notebook.history.collector import Collector
from labkit.notebook.history.curves import MEMORY
from labkit.notebook.history.curves import Curve
from labkit.notebook.history.curves import by_step
from labkit.notebook.history.curves import is_noisy
from labkit.notebook.history.curves import over_ranks
from labkit.notebook.history.curves import smooth
from labkit.notebook.history.thinning import MAX_POINTS
from labkit.records import NOTICED_LOSS
from labkit.records import RECORD
from labkit.records import Batch

NAN = float("nan")


def grown(values: np.ndarray, batch: int) -> Curve:
    """A curve that got `values` at steps 0, 1, ... in batches."""
    curve = Curve()
    steps = np.arange(len(values))
    for start in range(0, len(values), batch):
        curve.extend(steps[start : start + batch], values[start : start + batch])
    return curve


def send(
    collector: Collector,
    rank: int,
    *logged: tuple[str, int, float],
    names: tuple[str, ...] = ("loss",),
    memory_bytes: int = 100,
) -> None:
    rows = [
        (names.index(n), step, 0.1 * step, memory_bytes, v) for n, step, v in logged
    ]
    records = np.array(rows, dtype=RECORD)
    sequence = collector.num_received[rank]
    collector.add(rank, Batch(sequence, list(names), records))


# ---- one curve ----


@pytest.mark.parametrize("num_values", [0, 1, 5, 999, MAX_POINTS])
@pytest.mark.parametrize("batch", [1, 7, 5000])
def test_few_points_are_all_there(num_values: int, batch: int) -> None:
    values = np.random.default_rng(0).normal(size=num_values)
    x, y = grown(values, batch).points()
    np.testing.assert_array_equal(x, np.arange(num_values))
    np.testing.assert_array_equal(y, values)


@pytest.mark.parametrize("num_values", [1_001, 4_097, 20_011, 300_000])
@pytest.mark.parametrize("batch", [100, 3_001, 10**6])
def test_many_points_become_few_of_them_in_order(num_values: int, batch: int) -> None:
    values = np.random.default_rng(0).normal(size=num_values)
    x, y = grown(values, batch).points()
    assert MAX_POINTS // 2 <= len(x) <= MAX_POINTS + 5
    assert (np.diff(x) >= 0).all()
    assert x[-1] == num_values - 1, "the newest value is always seen"
    np.testing.assert_array_equal(y, values[x.astype(int)])
    assert (y.min(), y.max()) == (values.min(), values.max())


def test_every_part_of_a_long_curve_keeps_its_share_of_the_points() -> None:
    x, _ = grown(np.random.default_rng(0).normal(size=100_000), 50).points()
    counts, _ = np.histogram(x, bins=10, range=(0, 100_000))
    assert counts.min() > 0.7 * counts.max()


@pytest.mark.parametrize("batch", [1, 13, 4000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_peak_is_kept_however_it_came(batch: int, sign: int) -> None:
    for peak in (0, 1, 2, 1999, 2000, 2001, 3998, 3999):
        values = np.zeros(4000)
        values[peak] = sign * 5.0
        x, y = grown(values, batch).points()
        assert x[y == sign * 5.0].tolist()[:1] == [peak]


def test_nan_hides_no_other_value_and_a_stretch_of_it_is_a_gap() -> None:
    values = np.ones(10_000)
    values[4_000:6_000] = NAN
    values[8_000::2] = np.inf
    values[9_001] = 7.0
    x, y = grown(values, 128).points()
    gap = (x > 4_100) & (x < 5_900)
    assert gap.any()
    assert np.isnan(y[gap]).all()
    assert 7.0 in y
    assert np.isfinite(y[(x > 8_100) & (x < 9_900)]).all()


@pytest.mark.parametrize("batch", [1, 3, 4, 100])
@pytest.mark.parametrize(
    ("values", "step", "word", "lasts"),
    [
        ([1, 1, NAN, NAN], 2, "NaN", True),
        ([1, np.inf, NAN, NAN], 1, "infinite", True),
        ([NAN, 1, 1, 1], 0, "NaN", False),
        ([1, NAN, 1, 1, -np.inf, -np.inf], 4, "infinite", True),
        ([1, NAN, NAN, 1, np.inf, 1, 1], 1, "NaN", False),
        ([NAN] * 7, 0, "NaN", True),
    ],
)
def test_where_trouble_began_does_not_depend_on_batches(
    values: list[float], step: int, word: str, lasts: bool, batch: int
) -> None:
    trouble = grown(np.array(values), batch).non_finite
    assert trouble is not None
    assert (trouble.step, trouble.word, trouble.lasts) == (step, word, lasts)


def test_a_curve_without_trouble_says_so() -> None:
    assert grown(np.ones(10), 3).non_finite is None


# ---- over the ranks ----


def test_a_step_is_summed_up_when_every_rank_has_taken_it() -> None:
    collector = Collector([0, 1, 2])
    for rank, count in enumerate((5, 4, 6)):
        send(collector, rank, *(("loss", s, s + 10.0 * rank) for s in range(1, count)))
    collector.curves.update()
    steps = collector.curves.spread("loss")[0]
    assert steps.tolist() == [1, 2], "records of step 3 may still be on their way"
    collector.curves.update(is_final=True)
    rows = collector.curves.spread("loss")
    assert rows[0].tolist() == [1, 2, 3, 4, 5]
    assert rows[1].tolist() == [1, 2, 3, 4, 25], "least"
    assert rows[2].tolist() == [11, 12, 13, 14, 25], "median"
    assert rows[3].tolist() == [21, 22, 23, 24, 25], "greatest"
    assert rows[4].tolist() == [11, 12, 13, 14, 25], "mean"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_in_step_are_summed_up_as_any_others(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(num_ranks, 50))
    values[rng.random(values.shape) < 0.3] = NAN
    values[:, 7] = NAN
    steps = np.arange(50.0)
    np.testing.assert_allclose(
        over_ranks(steps, values), by_step(np.tile(steps, num_ranks), values.ravel())
    )


def test_the_mean_over_ranks_is_thinned_to_means() -> None:
    collector = Collector([0, 1])
    values = np.random.default_rng(0).normal(size=(2, 40_000))
    for first in range(0, 40_000, 500):
        for rank in range(2):
            steps = range(first, first + 500)
            send(collector, rank, *(("loss", s, values[rank, s]) for s in steps))
        collector.curves.update()
    rows = collector.curves.spread("loss")
    assert MAX_POINTS // 4 <= rows.shape[1] <= MAX_POINTS // 2 + 1
    assert rows[4].mean() == pytest.approx(values[:, :39_999].mean(), abs=1e-3)
    assert rows[1].min() == values[:, :39_999].min()
    assert rows[3].max() == values[:, :39_999].max()


def test_updates_on_the_way_change_nothing() -> None:
    often, once = Collector([0, 1]), Collector([0, 1])
    rng = np.random.default_rng(0)
    for step in range(1, 1500, 3):
        for rank in (0, 1):
            new = [("loss", step + k, rng.normal()) for k in range(3)]
            send(often, rank, *new)
            send(once, rank, *new)
        often.curves.update()
    for collector in (often, once):
        collector.curves.update(is_final=True)
    for rank in (0, 1):
        np.testing.assert_array_equal(
            np.unique(often.curves.curve(rank, "loss").points(), axis=1),
            np.unique(once.curves.curve(rank, "loss").points(), axis=1),
        )


# ---- what a collector holds ----


def test_metrics_are_those_that_are_drawn_in_order() -> None:
    names = ("samples", "loss", "val_loss", "tokens", "(epoch)", "accuracy")
    collector = Collector([0])
    send(collector, 0, *((name, 1, 1.0) for name in names), names=names)
    collector.curves.update()
    assert collector.curves.metrics() == ["val_loss", "accuracy"]


def test_memory_is_the_greatest_of_a_step() -> None:
    collector = Collector([0])
    names = ("loss", "other", "(epoch)")
    for memory_bytes, name in ((300, "loss"), (200, "other"), (900, "(epoch)")):
        send(collector, 0, (name, 1, 1.0), names=names, memory_bytes=memory_bytes)
    collector.curves.update()
    x, y = collector.curves.curve(0, MEMORY).points()
    assert (x.tolist(), y.tolist()) == ([1], [300]), "what is labkit's own counts not"


def test_a_loss_of_the_cells_own_takes_the_place_of_the_noticed_one() -> None:
    collector = Collector([0, 1])
    for rank in (0, 1):
        send(collector, rank, (NOTICED_LOSS, 1, 5.0), names=(NOTICED_LOSS,))
    collector.curves.update()
    assert collector.curves.curve(0, "loss").points()[1].tolist() == [5.0]
    for rank in (0, 1):
        send(collector, rank, ("loss", 1, 7.0), names=(NOTICED_LOSS, "loss"))
    collector.curves.update(is_final=True)
    assert collector.curves.curve(0, "loss").points()[1].tolist() == [7.0]
    assert collector.curves.spread("loss")[4].tolist() == [7.0]


def test_the_sum_over_ranks_of_what_a_step_has() -> None:
    collector = Collector([0, 1])
    send(collector, 0, ("samples", 1, 8.0), ("samples", 2, 4.0), names=("samples",))
    send(collector, 1, ("samples", 1, 8.0), ("samples", 2, 6.0), names=("samples",))
    collector.curves.update()
    assert collector.curves.per_step("samples") == 6.0 + 7.0
    assert collector.curves.per_step("tokens") is None


def test_a_run_that_is_drawn_and_asked_at_once_loses_nothing() -> None:
    collector = Collector([0, 1])
    threads = [threading.Thread(target=read_until, args=[collector]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(1, 2001):
        for rank in (0, 1):
            send(collector, rank, ("loss", step, float(step)))
    for thread in threads:
        thread.join()
    curves = collector.curves
    curves.update(is_final=True)
    for rank in (0, 1):
        assert curves.curve(rank, "loss").num_values == 2000
        assert curves.curve(rank, "loss").total == 2000 * 2001 / 2
    rows = curves.spread("loss")
    assert rows[0, -1] == 2000
    assert (rows[0] == rows[3]).all(), "in each stretch the last loss is the greatest"


def read_until(collector: Collector) -> None:
    """Read as a picture does, until all steps are there."""
    curves = collector.curves
    while min(collector.steps.values()) < 2000:
        with curves.lock:
            curves.update()
            x, y = curves.curve(0, "loss").points()
            assert (x == y).all()


def test_drawing_a_run_as_final_before_its_end_spoils_nothing() -> None:
    collector = Collector([0, 1])
    for step in range(1, 40):
        for rank in (0, 1):
            send(collector, rank, ("loss", step, float(step + rank)))
        collector.curves.update(is_final=step % 10 == 0)
    collector.curves.update(is_final=True)
    rows = collector.curves.spread("loss")
    assert rows[0].tolist() == list(range(1, 40))
    assert rows[4].tolist() == [step + 0.5 for step in range(1, 40)]


# ---- smoothing ----


def test_a_line_is_smoothed_to_itself_up_to_its_ends() -> None:
    line = 3.0 - 0.02 * np.arange(200)
    np.testing.assert_allclose(smooth(line, 6.0), line, atol=1e-9)


def test_smoothing_leaves_nan_out_and_where_it_is() -> None:
    line = np.arange(100.0)
    line[[3, 50, 51, 99]] = NAN
    found = smooth(line, 4.0)
    assert np.flatnonzero(np.isnan(found)).tolist() == [3, 50, 51, 99]
    keep = ~np.isnan(line)
    np.testing.assert_allclose(found[keep], line[keep], atol=1e-8)


def test_a_smoothed_loss_begins_where_the_loss_does() -> None:
    loss = 2.4 * np.exp(-np.arange(1400) / 30)
    noise = 0.02 * np.random.default_rng(0).standard_normal(len(loss))
    found = smooth(loss + noise, 28.0)
    assert abs(found[0] - 2.4) < 0.1
    assert np.abs(found - loss)[:100].max() < 0.3


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [NAN] * 9, [1.0, NAN, NAN]])
def test_what_cannot_be_smoothed_stays(values: list[float]) -> None:
    np.testing.assert_array_equal(smooth(np.array(values), 5.0), values)


def test_noise_is_going_up_and_down() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(200)
    assert not is_noisy(np.exp(-steps / 50))
    assert not is_noisy(np.ones(200))
    assert is_noisy(np.exp(-steps / 50) + 0.1 * rng.normal(size=200))
    assert not is_noisy(rng.normal(size=10)), "too few to tell"


def test_curves_keep_nothing_of_the_records_that_they_were_made_of() -> None:
    collector = Collector([0, 1])
    tracemalloc.start()
    for first, num_records in ((0, 10**5), (10**5, 2 * 10**4)):
        records = np.ones(num_records, RECORD)
        records["step"] = first + np.arange(num_records)
        for rank in collector.ranks:
            collector.add(rank, Batch(first, ["(unwritten)", "loss"], records))
        collector.curves.update()
    kept = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, curves.__file__)]
    )
    tracemalloc.stop()
    assert sum(each.size for each in kept.statistics("filename")) < 2**18
