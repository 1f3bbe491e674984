"""One panel of a run's picture: a metric of all ranks against the step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from matplotlib.ticker import MaxNLocator
from matplotlib.ticker import NullFormatter
from matplotlib.ticker import NullLocator

from labkit.notebook.history.curves import MAX_RANK_LINES
from labkit.notebook.history.curves import MEMORY
from labkit.notebook.history.curves import Curves
from labkit.notebook.history.curves import Points
from labkit.notebook.history.curves import is_noisy
from labkit.notebook.history.curves import smooth
from labkit.notebook.history.marks import Mark
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import SMALL
from labkit.notebook.plots.style import WARNING_INK
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import style_of
from labkit.records import memory_unit

Limits = tuple[float, float]

MIN_STEPS_OF_MEAN = 30
SMOOTHING = 0.02
"""The width of the smoothing, as a share of the curve's length."""
FINE_SMOOTHING = 0.005
"""That of one rank's line, where it is too dense to be drawn as it is."""
MAX_ROUGH_POINTS = 400
NUM_RECENT = 20
"""How many of the newest points decide which rank is worst."""


class Panel:
    """A metric's axes and what is drawn in them; kept, and updated in place.

    Up to `MAX_RANK_LINES` ranks have a line each, and a mean over them; more have a
    band from the least to the greatest, the median, and the line of the worst rank.
    Memory, in bytes, is in a unit that suits it.
    """

    def __init__(
        self,
        axes: Axes,
        metric: str,
        label: str,
        ranks: list[int],
        *,
        has_mean: bool = True,
        log_scale: bool = False,
    ) -> None:
        self.axes = axes
        self._marked: set[Mark] = set()
        self.metric = metric
        self.log_scale = log_scale
        self._unit = 1.0
        self._has_mean = has_mean
        self._styles = {rank: style_of(place) for place, rank in enumerate(ranks)}
        self.is_band = len(ranks) > MAX_RANK_LINES
        style_axes(axes, "optimizer step", label)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.ticklabel_format(axis="y", useOffset=False, scilimits=(-5, 6))
        # A power of ten on the left would push the title up, into what is above.
        axes.yaxis.set_offset_position("right")
        if log_scale:
            use_log_scale(axes)
        (self.band,) = axes.fill([], [], color="#4C78A8", alpha=0.28, lw=0)
        self.lines: dict[int, Line2D] = {}
        if not self.is_band:
            for rank, style in self._styles.items():
                (self.lines[rank],) = axes.plot([], [], lw=1.4, ms=3.5, **style)
                self.lines[rank].set_label(f"rank {rank}")
        (self.worst,) = axes.plot([], [], lw=1.1)
        (self.middle,) = axes.plot([], [], color=INK, lw=2.0)
        # Both above the axes, where no curve is.
        self._worst_label = axes.text(
            1.0, 1.02, "", transform=axes.transAxes, ha="right", fontsize=SMALL
        )
        self._trouble = axes.text(
            0.0, 1.02, "", transform=axes.get_xaxis_transform(), fontsize=SMALL
        )
        (self.mark,) = axes.plot(
            [],
            [],
            transform=axes.get_xaxis_transform(),
            ls=":",
            lw=1.2,
            marker="X",
            ms=8,
            markeredgecolor="white",
            markevery=[1],
        )

    def artists(self) -> list[Artist]:
        """All that is redrawn when there is more data, in order."""
        found = [self.band, *self.lines.values(), self.worst, self.middle]
        return [*found, self.mark, self._trouble, self._worst_label]

    @property
    def has_range(self) -> bool:
        """Whether a band from the least to the greatest is drawn."""
        return len(self.band.get_xy()) > 1

    @property
    def has_middle(self) -> bool:
        """Whether a mean or median is drawn."""
        return len(np.asarray(self.middle.get_xdata())) > 0

    def update(self, curves: Curves) -> bool:
        """Draw what `curves` hold; whether the unit has changed."""
        has_changed = self.metric == MEMORY and self._use_unit_of(curves)
        spread = curves.spread(self.metric)
        if self.is_band:
            self._draw_band(curves, spread)
        else:
            self._draw_lines(curves, spread)
        self._mark_trouble(curves)
        return has_changed

    def _use_unit_of(self, curves: Curves) -> bool:
        """Divide by what suits the greatest value, and say so at the axis."""
        ends = [curves.curve(rank, MEMORY).greatest for rank in self._styles]
        unit, name = memory_unit(max(ends, default=0.0))
        has_changed = unit != self._unit
        self._unit = float(unit)
        self.axes.set_ylabel(f"memory of tensors ({name})")
        return has_changed

    def mark_steps(self, marks: Sequence[Mark]) -> bool:
        """Draw a thin line at each of these steps; whether there is a new one."""
        new = [mark for mark in marks if mark not in self._marked]
        self._marked |= set(new)
        for mark in new:
            self.axes.axvline(mark.step, lw=1.0, **style_of_mark(mark))
        return bool(new)

    def _draw_lines(self, curves: Curves, spread: np.ndarray) -> None:
        points = {rank: self._points(curves, rank) for rank in self.lines}
        num_steps = max((curves.num_steps(rank) for rank in self.lines), default=0)
        for rank, line in self.lines.items():
            # Seldom logged, as once an epoch: the points are what is known.
            num_values = curves.curve(rank, self.metric).num_values
            is_seldom = num_values <= max(1, 0.2 * num_steps)
            line.set_marker("o" if is_seldom and num_values <= 200 else "")
        values = next((y for _, y in points.values() if len(y)), np.empty(0))
        is_rough = self._has_mean and is_noisy(values)
        if self._has_mean and (is_rough or do_differ(spread)):
            self.middle.set_data(spread[0], self._smooth(spread[4]))
        is_dense = is_rough and len(values) > MAX_ROUGH_POINTS
        if is_dense:  # the last rank's line would hide the others
            self._draw_range(spread)
        for rank, line in self.lines.items():
            steps, values = points[rank]
            if is_dense:
                values = smooth(values, FINE_SMOOTHING * len(values))
            line.set_data(steps, values)
            is_pale = is_rough and not is_dense
            line.set_alpha(0.7 / len(self.lines) ** 0.4 if is_pale else None)
            line.set_linewidth(1.0 if is_rough else 1.4)

    def _draw_band(self, curves: Curves, spread: np.ndarray) -> None:
        self._draw_range(spread)
        steps, median = spread[0], spread[2]
        middle = self._smooth(median) if self._has_mean else median / self._unit
        self.middle.set_data(steps, middle)
        recent: dict[int, float] = {}
        for rank in self._styles:
            newest = self._points(curves, rank)[1][-NUM_RECENT:]
            if (~np.isnan(newest)).any():
                recent[rank] = float(np.nanmean(newest))
        self._mark_worst(curves, recent)

    def _draw_range(self, spread: np.ndarray) -> None:
        steps, low, _, high, _ = spread[:, ~np.isnan(spread[1])]
        edge = np.concatenate([low, high[::-1]]) / self._unit
        there_and_back = np.concatenate([steps, steps[::-1]])
        self.band.set_xy(np.stack([there_and_back, edge], axis=1))

    def _mark_worst(self, curves: Curves, recent: dict[int, float]) -> None:
        """Draw the rank with the highest loss or most memory; of other metrics, the
        one that is farthest from the median."""
        values = np.array([*recent.values()])
        if not len(values) or np.ptp(values) <= 1e-6 * np.abs(values).max():
            self.worst.set_data([], [])
            self._worst_label.set_text("")
            return
        centre = np.median(values)
        is_worse_above = self.metric in ("loss", MEMORY)
        excess = values - centre if is_worse_above else np.abs(values - centre)
        rank = [*recent][int(excess.argmax())]
        self.worst.set_data(*self._points(curves, rank))
        self.worst.set_color(self._styles[rank]["color"])
        self._worst_label.set_color(self._styles[rank]["color"])
        word = "max" if recent[rank] > centre else "min"
        self._worst_label.set_text(f"{word}: rank {rank}")

    def _mark_trouble(self, curves: Curves) -> None:
        """A cross with a dotted line where the metric was NaN or infinite first."""
        found = {
            rank: curves.curve(rank, self.metric).non_finite for rank in self._styles
        }
        steps = {rank: trouble.step for rank, trouble in found.items() if trouble}
        if not steps:
            return
        rank = min(steps, key=lambda rank: steps[rank])
        trouble, colour = found[rank], self._styles[rank]["color"]
        assert trouble is not None
        self.mark.set_data([trouble.step] * 2, [0.0, 1.0])
        self.mark.set_color(colour)
        is_right = trouble.step > 0.6 * self.axes.get_xlim()[1]
        self._trouble.set(
            x=trouble.step,
            text=f"   rank {rank}: {trouble.word}   ",
            ha="right" if is_right else "left",
            color=colour,
        )

    def _points(self, curves: Curves, rank: int) -> Points:
        steps, values = curves.curve(rank, self.metric).points()
        return steps, values / self._unit

    def _smooth(self, values: np.ndarray) -> np.ndarray:
        return smooth(values / self._unit, SMOOTHING * len(values))

    # ---- limits ----

    def steps(self) -> np.ndarray:
        """Those that anything is drawn at."""
        lines = (*self.lines.values(), self.middle, self.worst)
        return np.concatenate([np.asarray(line.get_xdata()) for line in lines])

    def data_limits(self) -> Limits | None:
        """Least and greatest value that is drawn, as a power of ten on a log scale;
        None where there is none."""
        values = [line.get_ydata() for line in (*self.lines.values(), self.worst)]
        values.append(self.band.get_xy()[:, 1])
        joined = np.concatenate([np.asarray(each, dtype=float) for each in values])
        # Differences of such values have to be finite as well.
        seen = joined[np.abs(joined) < 1e300]
        if self.log_scale:
            seen = np.log10(seen[seen > 1e-300])
        return (float(seen.min()), float(seen.max())) if len(seen) else None

    def set_limits(self, low: float, high: float) -> None:
        """Show `low` to `high`, powers of ten on a log scale, with some room."""
        margin = 0.05 * (high - low) or 0.05
        if self.log_scale:
            self.axes.set_ylim(10 ** (low - margin), 10 ** (high + 2 * margin))
        else:
            self.axes.set_ylim(low - margin if low else 0.0, high + 2 * margin)


def do_differ(spread: np.ndarray) -> bool:
    """Whether ranks differ enough, for long enough, that their mean is worth drawing.

    `spread`: (5, num_steps), as of `Curves.spread`.
    """
    _, low, _, high, _ = spread[:, ~np.isnan(spread[1])]
    if len(low) < MIN_STEPS_OF_MEAN:
        return False
    return bool((high - low).max() > 0.05 * (high.max() - low.min()))


def style_of_mark(mark: Mark) -> dict[str, Any]:
    """Of its line, here and in the legend."""
    if mark.is_death:
        return {"color": WARNING_INK, "ls": "-"}
    return {"color": INK, "ls": (0, (5, 3))}


def use_log_scale(axes: Axes) -> None:
    """A log scale with plain numbers; what is not above 0 is left out."""
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
