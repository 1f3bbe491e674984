import io
import warnings
from collections.abc import Iterator
from itertools import combinations
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from labkit.notebook.history.collector import Collector
from labkit.notebook.history.curves import MEMORY
from labkit.notebook.history.marks import Mark
from labkit.notebook.history.thinning import MAX_POINTS
from labkit.notebook.history.thinning import thin
from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.figure import to_png
from labkit.notebook.plots.memory_bars import PART_COLOURS
from labkit.notebook.plots.run_plot import RunPlot
from labkit.notebook.plots.step_memory import draw_components
from labkit.notebook.plots.step_memory import draw_moments
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import WARNING_INK
from labkit.notebook.plots.style import ink_on
from labkit.notebook.plots.style import style_of
from labkit.notebook.runs.progress import remarks
from labkit.notebook.runs.run import Run
from labkit.records import COMPONENTS
from labkit.records import PARTS
from labkit.records import RECORD
from labkit.records import Batch

MIB = 2**20


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """A warning under a live picture would be printed at every refresh.

    But for those of garbage, which may be any earlier test's: it is collected when
    it is, by whoever allocates.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("default", pytest.PytestUnraisableExceptionWarning)
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
    loss, memory = plot.panels["loss"], plot.panels[MEMORY]
    return list(loss.lines.values()), list(memory.lines.values())


def log(collector: Collector, rank: int, **metrics: dict[int, float]) -> None:
    """Log metrics at steps: `log(collector, 0, val_loss={10: 0.5})`."""
    names = list(metrics)
    rows = [
        (names.index(name), step, 0.1 * step, MIB, value)
        for name, values in metrics.items()
        for step, value in values.items()
    ]
    records = np.array(sorted(rows, key=lambda row: row[1]), dtype=RECORD)
    collector.add(rank, Batch(0, names, records))


def texts(plot: RunPlot) -> list[str]:
    """What stands in the picture, but for axes and legends."""
    inside = [text for axes in plot.figure.axes for text in axes.texts]
    found = [text.get_text().strip() for text in (*plot.figure.texts, *inside)]
    return [text for text in found if text]


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


def test_an_empty_panel_says_why_when_the_run_is_over() -> None:
    collector = Collector([0, 1])
    for rank in (0, 1):
        log(collector, rank, samples={1: 32.0, 2: 32.0})
    plot = RunPlot(collector)
    why = "no loss: none was given\nto backward() or to log(loss=...)"
    plot.update("running")
    assert why not in texts(plot)
    plot.update("finished", is_final=True)
    assert why in texts(plot)
    assert "not measured:\ntoo few optimizer steps" not in texts(plot)
    add(collector, 0, [1.0, 2.0])
    other = RunPlot(collector)
    other.update("finished", is_final=True)
    assert why not in texts(other)


def test_a_metric_that_is_not_the_loss_is_not_drawn_as_one() -> None:
    collector = Collector([0])
    records = np.array([(0, 1, 0.0, MIB, 0.9)], dtype=RECORD)
    collector.add(0, Batch(0, ["accuracy"], records))
    plot = RunPlot(collector)
    plot.update("")
    loss, memory = lines(plot)
    assert loss[0].get_xydata().tolist() == []
    assert memory[0].get_xydata().tolist() == [[1, 1024.0]]  # KiB
    [line] = plot.panels["accuracy"].lines.values()
    assert line.get_xydata().tolist() == [[1, 0.9]]


@pytest.mark.parametrize("ranks", [[0], [0, 1], range(8)])
def test_a_rank_has_one_colour_everywhere(ranks: list[int]) -> None:
    loss, memory = lines(RunPlot(Collector(ranks)))
    colours = [line.get_color() for line in loss]
    assert colours == [line.get_color() for line in memory]
    assert len(set(colours)) == len(ranks)
    assert len({str(line._unscaled_dash_pattern) for line in loss}) == len(ranks)
    assert [line.get_label() for line in memory] == [f"rank {rank}" for rank in ranks]


def test_axes_say_what_they_show_in_which_unit() -> None:
    for num_bytes, unit in ((60_000, "KiB"), (60 * MIB, "MiB"), (60 * 2**30, "GiB")):
        collector = Collector([0])
        records = np.array([(0, 1, 0.0, num_bytes, 0.9)], dtype=RECORD)
        collector.add(0, Batch(0, ["loss"], records))
        plot = RunPlot(collector, memory_is="held by tensors")
        plot.update("")
        loss, memory = plot.figure.axes
        assert (loss.get_xlabel(), loss.get_ylabel()) == ("optimizer step", "loss")
        assert memory.get_ylabel() == f"memory of tensors ({unit})"
        assert memory.get_title(loc="left") == "held by tensors"
        [line] = plot.panels[MEMORY].lines.values()
        assert line.get_ydata().max() == pytest.approx(60, rel=0.05)


def test_a_death_and_the_step_resumed_from_are_two_marks() -> None:
    collector = Collector([0, 1])
    for rank in (0, 1):
        add(collector, rank, [3.0, 2.0, 1.0])
    marks = [Mark(3, "rank 1 died", is_death=True), Mark(2, "resumed from\nstep 2")]
    plot = RunPlot(collector)
    for _ in range(2):  # each is drawn once
        plot.update("", marks=marks)
    for axes in plot.figure.axes:
        steps = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata())]
        assert [steps.count(3), steps.count(2)] == [1, 1]
        assert not [text for text in axes.texts if "died" in text.get_text()]
    [legend] = [axes.get_legend() for axes in plot.figure.axes if axes.get_legend()]
    words = [text.get_text() for text in legend.get_texts()]
    assert words[-2:] == ["rank 1 died", "resumed from\nstep 2"]


def test_the_axes_of_a_run_that_has_resumed_begin_there() -> None:
    collector = Collector([0])
    rows = [(0, step, 0.1, MIB, 1.0) for step in range(800, 820)]
    collector.add(0, Batch(0, ["loss"], np.array(rows, dtype=RECORD)))
    plot = RunPlot(collector)
    plot.update("", is_final=True)
    low, high = plot.figure.axes[0].get_xlim()
    assert 798 < low < 800 < 819 < high < 821


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


def test_each_further_metric_has_a_panel_in_rows_below() -> None:
    collector = Collector([0, 1])
    for rank in range(2):
        losses = {step: 1.0 / step for step in range(1, 31)}
        log(collector, rank, loss=losses, samples=losses, val_loss={10: 0.5, 20: 0.4})
    plot = RunPlot(collector)
    plot.update("")
    assert list(plot.panels) == ["loss", MEMORY, "val_loss"]
    below = plot.panels["val_loss"].axes
    assert below.get_title(loc="left") == "val_loss"
    assert below.get_position().y1 < plot.panels["loss"].axes.get_position().y0
    markers = {
        name: {line.get_marker() for line in panel.lines.values()}
        for name, panel in plot.panels.items()
    }
    assert markers["val_loss"] == {"o"}, "logged once an epoch: points"
    assert markers["loss"] == {""}


def test_a_resumed_run_that_is_short_has_no_points() -> None:
    collector = Collector([0])
    log(collector, 0, loss={step: 1.0 / step for step in range(277, 346)})
    plot = RunPlot(collector)
    plot.update("")
    [line] = plot.panels["loss"].lines.values()
    assert line.get_marker() == ""


def test_a_metric_may_appear_in_mid_run() -> None:
    collector = Collector([0])
    add(collector, 0, [3.0, 2.0])
    plot = RunPlot(collector)
    plot.update("")
    before = plot.png()
    records = np.array([(1, 2, 0.0, MIB, 0.9)], dtype=RECORD)
    collector.add(0, Batch(2, ["loss", "accuracy"], records))
    plot.update("")
    heights = []
    for png in (before, plot.png()):
        with Image.open(io.BytesIO(png)) as image:
            heights.append(image.size[1])
    assert heights[0] < heights[1]
    assert lines(plot)[0][0].get_xydata().tolist() == [[1, 3.0], [2, 2.0]]


def test_a_metric_may_have_any_name() -> None:
    names = ["$$", "$\\frac{$", "<b>x</b>", "two\nlines", "%s{x}"]
    collector = Collector([0])
    records = np.ones(len(names), RECORD)
    records["metric"], records["value"] = np.arange(len(names)), np.nan
    collector.add(0, Batch(0, names, records))
    run = Run("run-1", "ddp", "the code", collector)
    assert "$$ is NaN" in "".join(remarks(run))
    assert run.plot()._repr_png_()


def test_a_power_of_ten_at_the_axis_leaves_the_title_where_it_is() -> None:
    collector = Collector([0])
    log(collector, 0, large={1: 1.0, 2: 2.0}, small={1: 1e-7, 2: 2e-7})
    plot = RunPlot(collector)
    plot.update("", is_final=True)
    plot.png()
    assert plot.panels["small"].axes.yaxis.get_offset_text().get_text()
    heights = [
        text.get_window_extent().y0
        for name in ("large", "small")
        for text in plot.panels[name].axes.findobj(Text)
        if text.get_text() == name
    ]
    assert heights == [heights[0], heights[0]]


def test_six_metrics_are_drawn_and_the_others_are_counted() -> None:
    collector = Collector([0])
    log(collector, 0, **{f"metric_{k}": {1: 0.5} for k in range(9)})
    plot = RunPlot(collector)
    plot.update("")
    assert list(plot.panels)[2:] == [f"metric_{k}" for k in range(6)]
    assert "3 more metrics are in run.history" in texts(plot)


def noisy(num_steps: int, seed: int = 0) -> dict[int, float]:
    rng = np.random.default_rng(seed)
    values = 3.0 - np.arange(num_steps) / num_steps + 0.3 * rng.normal(size=num_steps)
    return dict(enumerate(values.tolist(), 1))


def test_noisy_curves_are_pale_beneath_a_smoothed_mean() -> None:
    collector = Collector([0, 1])
    curves = [noisy(200, seed=rank) for rank in range(2)]
    for rank, values in enumerate(curves):
        log(collector, rank, loss=values)
    plot = RunPlot(collector)
    plot.update("", is_final=True)
    panel = plot.panels["loss"]
    steps, smoothed = panel.middle.get_data()
    assert list(steps) == list(range(1, 201))
    mean = np.mean([list(values.values()) for values in curves], axis=0)
    assert np.abs(np.diff(smoothed)).sum() < 0.2 * np.abs(np.diff(mean)).sum()
    assert abs(np.mean(smoothed - mean)) < 0.01, "it does not lag behind"
    for line in panel.lines.values():
        assert line.get_alpha() < 1 < panel.middle.get_linewidth()


def test_where_lines_would_hide_each_other_their_range_is_drawn() -> None:
    collector = Collector([0, 1])
    for rank in range(2):
        log(collector, rank, loss=noisy(5000, seed=rank))
    plot = RunPlot(collector)
    plot.update("", is_final=True)
    panel = plot.panels["loss"]
    values = [*noisy(5000, 0).values(), *noisy(5000, 1).values()]
    heights = panel.band.get_xy()[:, 1]
    assert (heights.min(), heights.max()) == (min(values), max(values))
    assert panel.data_limits() == (min(values), max(values))
    for line in panel.lines.values():
        assert np.ptp(line.get_ydata()) < 0.8 * np.ptp(values)


def test_smooth_curves_are_drawn_as_they_are() -> None:
    collector = Collector([0, 1])
    for rank in range(2):
        log(collector, rank, loss={step: 1 / step for step in range(1, 200)})
    plot = RunPlot(collector)
    plot.update("", is_final=True)
    panel = plot.panels["loss"]
    assert not panel.has_middle, "the ranks agree: a mean would hide them"
    assert [line.get_alpha() for line in panel.lines.values()] == [None, None]


def test_many_ranks_are_a_band_with_the_worst_rank() -> None:
    collector = Collector(range(12))
    for rank in range(12):
        losses = [1.0 + (rank == 7) * 0.5 + 0.01 * rank] * 30
        add(collector, rank, losses, memory_bytes=(9 if rank == 3 else 5) * MIB)
    plot = RunPlot(collector)
    plot.update("", is_final=True)
    loss, memory = plot.panels["loss"], plot.panels[MEMORY]
    assert not loss.lines
    steps, height = loss.band.get_xy().T
    assert (steps.min(), steps.max()) == (1, 30)
    assert height.min() == pytest.approx(1.0)
    assert height.max() == pytest.approx(1.57)
    ranks = [1.0 + (rank == 7) * 0.5 + 0.01 * rank for rank in range(12)]
    np.testing.assert_allclose(loss.middle.get_ydata(), np.median(ranks))
    np.testing.assert_allclose(loss.worst.get_ydata(), 1.57)
    assert loss.worst.get_color() == style_of(7)["color"]
    assert set(memory.worst.get_ydata()) == {9.0}
    assert {"max: rank 7", "max: rank 3"} <= {*texts(plot)}
    assert loss.data_limits() == pytest.approx((1.0, 1.57))


def test_equal_ranks_have_no_worst() -> None:
    collector = Collector(range(9))
    for rank in range(9):
        add(collector, rank, [1.0, 0.5])
    plot = RunPlot(collector)
    plot.update("")
    assert not any("max: " in text for text in texts(plot))


@pytest.mark.parametrize("word", ["NaN", "infinite"])
@pytest.mark.parametrize("num_ranks", [2, 10])
def test_nan_is_marked_where_it_began(word: str, num_ranks: int) -> None:
    bad = {"NaN": float("nan"), "infinite": float("inf")}[word]
    collector = Collector(range(num_ranks))
    for rank in range(num_ranks):
        since = 14 if rank == 1 else 15
        add(collector, rank, [bad if step >= since else 1.0 for step in range(1, 21)])
    plot = RunPlot(collector)
    plot.update("")
    assert plot.panels["loss"].mark.get_xdata()[0] == 14
    assert plot.panels["loss"].mark.get_color() == style_of(1)["color"]
    assert f"rank 1: {word}" in texts(plot)
    assert plot.png().startswith(b"\x89PNG")


def test_a_log_scale_is_for_the_loss_alone_and_has_plain_numbers() -> None:
    collector = Collector([0])
    add(collector, 0, [100.0, 10.0, 1.0, 0.0, -1.0, 0.1])
    log_scale = Run("run-1", "raw", "", collector).plot(log_scale=True)
    loss, memory = log_scale.axes
    assert (loss.get_yscale(), memory.get_yscale()) == ("log", "linear")
    low, high = loss.get_ylim()
    assert 0 < low < 0.1 < 100 < high, "what is not above 0 cannot be shown"
    to_png(log_scale)
    labels = [label.get_text() for label in loss.get_yticklabels()]
    assert {"0.1", "1", "10", "100"} <= {*labels}


def test_a_log_scale_without_a_positive_loss_can_be_drawn() -> None:
    collector = Collector([0])
    add(collector, 0, [0.0, -1.0])
    plot = RunPlot(collector, log_scale=True)
    plot.update("")
    assert plot.png().startswith(b"\x89PNG")


def test_remarks_stand_below_the_title_and_long_lines_fit() -> None:
    plot = RunPlot(Collector([0]))
    long = "ten words " * 16
    plot.update(long, remarks=["rank 0 is slow", "2 batches lost"])
    assert "rank 0 is slow; 2 batches lost" in texts(plot)
    plot.png()
    for text in plot.figure.texts:
        assert text.get_window_extent().x1 <= plot.figure.bbox.x1


def moments_of_a_step() -> pd.DataFrame:
    """Two parameters' worth of gradients, which come in the backward pass."""
    held = {
        "parameters": [4 * MIB] * 4,
        "gradients": [0, 0, 4 * MIB, 4 * MIB],
        "optimizer_state": [8 * MIB] * 4,
        "activations": [0, 9 * MIB, 2 * MIB, 0],
    }
    phases = ["forward", "forward", "backward", "step"]
    rows = {"rank": 1, "step": 30, "seconds": [0.0, 0.1, 0.2, 0.3], "phase": phases}
    return pd.DataFrame(rows | dict.fromkeys(PARTS, 0) | held)


def test_the_memory_of_a_step_is_stacked_up_to_its_peak() -> None:
    figure = RunFigure()
    axes = figure.add_subplot()
    theory = pd.Series({"parameters": 4.0 * MIB, "gradients": 4.0 * MIB})
    draw_moments(axes, moments_of_a_step(), theory)
    tops = [each.get_paths()[0].vertices[:, 1].max() for each in axes.collections]
    assert max(tops) == 21
    assert axes.get_ylim()[1] >= 21
    colours = [tuple(each.get_facecolor()[0]) for each in axes.collections]
    names = ["parameters", "gradients", "optimizer_state", "activations"]
    assert colours == [to_rgba(PART_COLOURS[name]) for name in names]
    found = [text.get_text() for text in axes.texts]
    assert found == ["forward", "backward", "step", "peak\n21", "states by\ntheory"]
    assert axes.get_title(loc="left") == "step 30 of rank 1"
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)


def test_the_names_of_short_passes_do_not_touch() -> None:
    moments = moments_of_a_step().assign(seconds=[0.0, 0.2, 0.28, 0.3])
    figure = RunFigure(figsize=(9.0, 3.0))
    axes = figure.add_axes((0.08, 0.2, 0.333, 0.57))  # as wide as in a run's picture
    draw_moments(axes, moments, None)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts[:3]]
    assert [text.get_text() for text in axes.texts[:3]] == [
        "forward",
        "backward",
        "step",
    ]
    for before, after in pairwise(boxes):
        assert after.x0 - before.x1 > 2, "pixels"


def test_a_component_is_drawn_beside_theory_with_the_range_of_the_ranks() -> None:
    memory = pd.DataFrame(
        {name: [0, 0] for name in COMPONENTS}
        | {"parameters": [MIB * 4, MIB * 8], "total_peak": [MIB * 9] * 2}
    )
    axes = RunFigure().add_subplot()
    draw_components(axes, memory, pd.Series({"parameters": 6.0 * MIB}), others=MIB)
    bars = {round(bar.get_width(), 3): bar.get_alpha() for bar in axes.patches}
    assert bars == {8.0: None, 6.0: 0.4, 1.0: None}
    [[start, end]] = [path.vertices[:, 0] for path in axes.collections[0].get_paths()]
    assert (start, end) == (4, 8)
    assert axes.get_title(loc="left") == "by component"
    [key] = [text.get_text() for text in axes.texts if ":" in text.get_text()]
    assert key == "pale: theory, line: lowest to highest rank"
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["parameters", "older tensors"]
    assert axes.get_xlabel() == "MiB"


def test_components_are_in_the_unit_of_the_step_beside_them() -> None:
    memory = pd.DataFrame(
        {name: [0] for name in COMPONENTS}
        | {"parameters": [MIB], "total_peak": [MIB * 4]}
    )
    axes = RunFigure().add_subplot()
    draw_components(axes, memory, None, others=0.0)
    assert axes.get_xlabel() == "MiB"


def test_the_last_picture_has_room_for_the_memory_below_all_panels() -> None:
    collector = Collector([0])
    log(collector, 0, **{f"metric_{k}": {1: 0.5} for k in range(6)})
    plot = RunPlot(collector)
    plot.update("")
    plot.add_memory(
        pd.DataFrame({name: [MIB] for name in COMPONENTS}), moments_of_a_step()
    )
    plot.update("", is_final=True)
    boxes = [axes.get_position() for axes in plot.figure.axes]
    assert len(boxes) == 10
    for number, box in enumerate(boxes):
        assert 0 < box.x0 < box.x1 < 1
        assert 0 < box.y0 < box.y1 < 1
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])


def test_what_is_written_on_a_colour_is_read() -> None:
    inks = {colour: ink_on(colour) for colour in (*RANK_COLOURS, "#4C78A8", "white")}
    white = {colour for colour, ink in inks.items() if ink == "white"}
    assert white == {"#0072B2", "#D55E00", "#6600CC", "#663300", "#4C78A8"}


def test_every_colour_is_seen_on_white() -> None:
    assert len(set(RANK_COLOURS)) == 8
    for colour in RANK_COLOURS:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert 0.3 * red + 0.59 * green + 0.11 * blue < 190


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
        assert image.size == (900, 330)
        assert len(image.convert("RGB").getcolors() or []) > 8, "it is not blank"


def test_a_live_picture_has_the_colours_of_what_was_not_in_its_first_one() -> None:
    collector = Collector([0, 1])
    plot = RunPlot(collector)
    plot.update("run-1")
    plot.png()
    plot.update("run-1", remarks=["rank 1 is slowest: takes 40% longer than rank 0"])
    ink = tuple(round(255 * each) for each in to_rgba(WARNING_INK)[:3])
    with Image.open(io.BytesIO(plot.png())) as image:
        found = image.convert("RGB").getcolors() or []
    assert ink in {colour for _, colour in found}


def test_areas_have_their_own_colours_in_the_png() -> None:
    figure = RunFigure(figsize=(9, 3))
    pale = [(*to_rgba(colour)[:3], 0.4) for colour in PART_COLOURS.values()]
    colours = [*PART_COLOURS.values(), *pale]
    for place, colour in enumerate(colours):
        patch = Rectangle((place / len(colours), 0), 1 / len(colours), 1, color=colour)
        figure.add_artist(patch)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = np.asarray(canvas.buffer_rgba())[150]
    with Image.open(io.BytesIO(to_png(figure))) as image:
        shown = np.asarray(image.convert("RGB"))[150]
    middles = [int(900 * (place + 0.5) / len(colours)) for place in range(len(colours))]
    assert shown[middles].tolist() == drawn[middles, :3].tolist()


def test_a_picture_is_told_in_words() -> None:
    collector = Collector([0, 1])
    for rank in 0, 1:
        add(collector, rank, [2.0, 1.0])
    plot = RunPlot(collector)
    plot.update("run-1: ddp on 2 ranks")
    bundle, metadata = plot.figure._repr_mimebundle_()
    assert bundle == {"image/png": to_png(plot.figure)}
    assert metadata["image/png"]["alt"] == (
        "run-1: ddp on 2 ranks; loss by optimizer step; memory of tensors (KiB) by "
        "optimizer step; rank 0, rank 1"
    )


def test_powers_of_ten_are_no_words_of_a_picture() -> None:
    figure = RunFigure()
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_xlim(1e-3, 10)
    axes.set_yticks([0, 1], ["ddp", "fsdp"])
    _, metadata = figure._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == "ddp, fsdp"


def test_a_notebook_shows_a_runs_plot_as_that_png() -> None:
    collector = Collector([0])
    add(collector, 0, [3.0, 2.0])
    figure = Run("run-1", "ddp", "", collector).plot()
    assert figure._repr_png_() == to_png(figure)
    shown: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("IPython.display.display", shown.append)
        figure.show()
    assert shown == [figure]
