import io
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from matplotlib.lines import Line2D
from PIL import Image

from labkit.notebook.collector import Collector
from labkit.notebook.plots import MAX_POINTS
from labkit.notebook.plots import RANK_COLOURS
from labkit.notebook.plots import RunPlot
from labkit.notebook.plots import thin
from labkit.notebook.plots import to_png
from labkit.notebook.runs import Run
from labkit.records import RECORD
from labkit.records import Batch

MIB = 2**20


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """A warning under a live picture would be printed at every refresh."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def add(
    collector: Collector, rank: int, losses: list[float], memory_bytes: int = MIB
) -> None:
    """Log losses at the rank's next steps."""
    done = collector.steps[rank]
    rows = [(0, done + k, 0.1 * k, memory_bytes, v) for k, v in enumerate(losses, 1)]
    records = np.array(rows, dtype=RECORD)
    collector.add(rank, Batch(0, ["loss"], records))


def lines(plot: RunPlot) -> tuple[list[Line2D], list[Line2D]]:
    """The lines of loss and those of memory, by rank."""
    loss, memory = plot.figure.axes
    return list(loss.get_lines()), list(memory.get_lines())


# ---- thin ----


@pytest.mark.parametrize("num_points", [0, 1, 2, MAX_POINTS // 2, MAX_POINTS])
def test_few_points_are_all_kept(num_points: int) -> None:
    x = np.arange(num_points)
    y = np.random.default_rng(0).normal(size=num_points)
    kept_x, kept_y = thin(x, y)
    np.testing.assert_array_equal(kept_x, x)
    np.testing.assert_array_equal(kept_y, y)


@pytest.mark.parametrize("num_points", [1001, 1499, 2000, 2999, 10_007, 100_000])
def test_many_points_become_at_most_a_thousand_and_one(num_points: int) -> None:
    x = np.arange(num_points)
    y = np.random.default_rng(0).normal(size=num_points)
    kept_x, kept_y = thin(x, y)
    assert MAX_POINTS // 2 < len(kept_x) <= MAX_POINTS + 1
    assert (np.diff(kept_x) > 0).all(), "in order, none twice"
    np.testing.assert_array_equal(kept_y, y[kept_x])
    assert kept_x[-1] == num_points - 1, "the newest value is always seen"


@pytest.mark.parametrize("num_points", [1001, 1499, 2999, 10_007])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_peak_is_kept_wherever_it_is(num_points: int, sign: int) -> None:
    x = np.arange(num_points)
    near_the_ends = [*range(20), *range(num_points - 20, num_points)]
    for peak in [*near_the_ends, *range(0, num_points, 97)]:
        y = np.zeros(num_points)
        y[peak] = sign * 5.0
        assert peak in thin(x, y)[0]


def test_nan_hides_no_other_value() -> None:
    x = np.arange(10_000)
    y = np.where(x % 3 == 0, 1.0, np.nan)
    y[4_011] = 9.0
    kept_x, kept_y = thin(x, y)
    assert 4_011 in kept_x
    assert len(kept_x) <= MAX_POINTS + 1
    assert np.isfinite(kept_y[:-1]).all()


def test_a_stretch_of_nan_alone_stays_a_gap() -> None:
    x = np.arange(10_000)
    y = np.where((x > 4_000) & (x < 6_000), np.nan, 1.0)
    kept_x, kept_y = thin(x, y)
    gap = (kept_x > 4_100) & (kept_x < 5_900)
    assert gap.any()
    assert np.isnan(kept_y[gap]).all()


# ---- the picture of a run ----


def test_a_picture_draws_what_the_collector_holds() -> None:
    collector = Collector([0, 1])
    plot = RunPlot(collector)
    add(collector, 0, [3.0, 2.0], memory_bytes=5 * MIB)
    add(collector, 1, [4.0], memory_bytes=7 * MIB)
    plot.update("two ranks")
    loss, memory = lines(plot)
    assert loss[0].get_xydata().tolist() == [[1, 3.0], [2, 2.0]]
    assert loss[1].get_xydata().tolist() == [[1, 4.0]]
    assert memory[0].get_xydata().tolist() == [[1, 5.0], [2, 5.0]]
    assert memory[1].get_xydata().tolist() == [[1, 7.0]]
    assert "two ranks" in [text.get_text() for text in plot.figure.texts]


def test_an_update_keeps_figure_and_lines() -> None:
    collector = Collector([0])
    plot = RunPlot(collector)
    add(collector, 0, [3.0])
    plot.update("")
    figure, before = plot.figure, lines(plot)
    add(collector, 0, [2.0])
    plot.update("")
    assert plot.figure is figure
    assert lines(plot) == before
    assert before[0][0].get_xydata().tolist() == [[1, 3.0], [2, 2.0]]


def test_axes_grow_with_the_data() -> None:
    collector = Collector([0])
    plot = RunPlot(collector)
    add(collector, 0, [1.0, 0.5], memory_bytes=10 * MIB)
    plot.update("")
    add(collector, 0, [80.0] * 100, memory_bytes=400 * MIB)
    plot.update("")
    loss, memory = plot.figure.axes
    assert loss.get_xlim()[1] >= 102
    assert loss.get_ylim()[1] >= 80
    assert memory.get_ylim()[0] == 0
    assert memory.get_ylim()[1] >= 400


def test_a_metric_that_is_not_the_loss_is_not_drawn_as_one() -> None:
    collector = Collector([0])
    records = np.array([(0, 1, 0.0, MIB, 0.9)], dtype=RECORD)
    collector.add(0, Batch(0, ["accuracy"], records))
    plot = RunPlot(collector)
    plot.update("")
    loss, memory = lines(plot)
    assert loss[0].get_xydata().tolist() == []
    assert memory[0].get_xydata().tolist() == [[1, 1.0]]


@pytest.mark.parametrize("ranks", [[0], [0, 1], range(8), range(20)])
def test_a_rank_has_one_colour_everywhere(ranks: list[int]) -> None:
    loss, memory = lines(RunPlot(Collector(ranks)))
    colours = [line.get_color() for line in loss]
    assert colours == [line.get_color() for line in memory]
    assert len(set(colours)) == min(len(ranks), len(RANK_COLOURS))
    assert [line.get_label() for line in memory] == [f"rank {rank}" for rank in ranks]


def test_axes_say_what_they_show_in_which_unit() -> None:
    loss, memory = RunPlot(Collector([0])).figure.axes
    assert (loss.get_xlabel(), loss.get_ylabel()) == ("optimizer step", "loss")
    assert "MiB" in memory.get_ylabel()


@pytest.mark.parametrize(
    ("losses", "memory_bytes"),
    [
        ([], 0),
        ([1.0], MIB),
        ([1.0, 1.0], 0),
        ([float("nan")] * 3, MIB),
        ([1.0, float("inf"), 2.0], MIB),
        ([1e30, 1e-30], MIB),
    ],
    ids=["nothing", "one point", "no memory", "NaN", "infinity", "extremes"],
)
def test_every_history_can_be_drawn(losses: list[float], memory_bytes: int) -> None:
    collector = Collector([0, 1])
    add(collector, 0, losses, memory_bytes)
    plot = RunPlot(collector)
    plot.update("")
    assert to_png(plot.figure).startswith(b"\x89PNG")


def test_an_empty_run_can_be_plotted() -> None:
    figure = Run("run-1", "ddp", "", Collector([0, 1])).plot()
    assert len(figure.axes) == 2


# ---- PNG ----


def test_the_png_is_small_and_valid() -> None:
    rng = np.random.default_rng(0)
    collector = Collector(range(8))
    for rank in range(8):
        add(collector, rank, list(rng.normal(size=5_000)))
    plot = RunPlot(collector)
    plot.update("eight ranks, as noisy as can be")
    png = to_png(plot.figure)
    assert len(png) < 60_000
    with Image.open(io.BytesIO(png)) as image:
        image.load()
        assert image.format == "PNG"
        assert image.size == (900, 310)
        assert len(image.convert("RGB").getcolors() or []) > 8, "it is not blank"


def test_a_notebook_shows_a_runs_plot_as_that_png() -> None:
    collector = Collector([0])
    add(collector, 0, [3.0, 2.0])
    figure = Run("run-1", "ddp", "", collector).plot()
    assert figure._repr_png_() == to_png(figure)
