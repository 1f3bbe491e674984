"""One panel of a run's picture: a metric of all ranks against the step."""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from matplotlib.ticker import LogLocator
from matplotlib.ticker import MaxNLocator
from matplotlib.ticker import NullFormatter
from matplotlib.ticker import NullLocator

from labkit.notebook.curves import MAX_RANK_LINES
from labkit.notebook.curves import MEMORY
from labkit.notebook.curves import Curves
from labkit.notebook.curves import Points
from labkit.notebook.curves import is_noisy
from labkit.notebook.curves import smooth
from labkit.notebook.look import INK
from labkit.notebook.look import dress
from labkit.notebook.look import style_of

Limits = tuple[float, float]

MIN_STEPS_OF_MEAN = 10
PALE = 0.45
SMOOTHING = 0.012
"""The width of the smoothing, as a share of the curve's length."""
NUM_RECENT = 20
"""How many of the newest points tell which rank is worst."""


class Panel:
    """A metric's axes and what is drawn in them; kept, and updated in place.

    Up to `MAX_RANK_LINES` ranks have a line each, and a mean over them; more have a
    band from the least to the greatest, the median, and the line of the worst rank.
    `unit` is what the metric's values are divided by.
    """

    def __init__(
        self,
        axes: Axes,
        metric: str,
        label: str,
        ranks: list[int],
        *,
        unit: float = 1.0,
        has_mean: bool = True,
        log_scale: bool = False,
    ) -> None:
        self.axes = axes
        self.metric = metric
        self.log_scale = log_scale
        self._unit = unit
        self._has_mean = has_mean
        self._styles = {rank: style_of(place) for place, rank in enumerate(ranks)}
        self.is_band = len(ranks) > MAX_RANK_LINES
        dress(axes, "optimizer step", label)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if log_scale:
            use_log_scale(axes)
        (self.band,) = axes.fill([], [], color="#0072B2", alpha=0.22, lw=0)
        self.lines: dict[int, Line2D] = {}
        if not self.is_band:
            for rank, style in self._styles.items():
                (self.lines[rank],) = axes.plot([], [], lw=1.4, ms=3.5, **style)
                self.lines[rank].set_label(f"rank {rank}")
        (self.worst,) = axes.plot([], [], lw=1.1)
        (self.middle,) = axes.plot([], [], color=INK, lw=2.0)
        self._worst_label = axes.text(
            0.99, 0.98, "", transform=axes.transAxes, ha="right", va="top", fontsize=8
        )
        self._marks: dict[int, Line2D] = {}

    def artists(self) -> list[Artist]:
        """All that is drawn anew when there is more data, in order."""
        found = [self.band, *self.lines.values(), self.worst, self.middle]
        return [*found, *self._marks.values(), self._worst_label]

    @property
    def has_middle(self) -> bool:
        """Whether a mean or median is drawn."""
        return len(self.middle.get_xdata()) > 0

    def update(self, curves: Curves) -> None:
        """Draw what `curves` hold."""
        spread = curves.spread(self.metric)
        if self.is_band:
            self._draw_band(curves, spread)
        else:
            self._draw_lines(curves, spread)
        for rank in self._styles:
            trouble = curves.curve(rank, self.metric).trouble
            if trouble is not None:
                self._mark(rank, trouble.step)

    def _draw_lines(self, curves: Curves, spread: np.ndarray) -> None:
        points = {rank: self._points(curves, rank) for rank in self.lines}
        num_steps = max((curves.num_steps(rank) for rank in self.lines), default=0)
        for rank, line in self.lines.items():
            line.set_data(*points[rank])
            # Seldom logged, as once an epoch: the points are what is known.
            num_values = curves.curve(rank, self.metric).num_values
            is_seldom = num_values <= max(1, 0.2 * num_steps)
            line.set_marker("o" if is_seldom and num_values <= 200 else "")
        values = next((y for _, y in points.values() if len(y)), np.empty(0))
        is_rough = self._has_mean and is_noisy(values)
        steps, mean = spread[0], spread[4]
        has_mean = len(self.lines) > 1 and len(steps) >= MIN_STEPS_OF_MEAN
        if self._has_mean and (is_rough or has_mean):
            self.middle.set_data(steps, self._smooth(mean))
        for line in self.lines.values():
            line.set_alpha(PALE if is_rough else None)
            line.set_linewidth(1.0 if is_rough else 1.4)

    def _draw_band(self, curves: Curves, spread: np.ndarray) -> None:
        steps, low, median, high, _ = spread[:, ~np.isnan(spread[1])]
        edge = np.concatenate([low, high[::-1]]) / self._unit
        there_and_back = np.concatenate([steps, steps[::-1]])
        self.band.set_xy(np.stack([there_and_back, edge], axis=1))
        self.middle.set_data(steps, self._smooth(median))
        recent: dict[int, float] = {}
        for rank in self._styles:
            newest = self._points(curves, rank)[1][-NUM_RECENT:]
            if (~np.isnan(newest)).any():
                recent[rank] = float(np.nanmean(newest))
        self._mark_worst(curves, recent)

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
        word = "highest" if recent[rank] > centre else "lowest"
        self._worst_label.set_text(f"rank {rank} {word}")

    def _mark(self, rank: int, step: int) -> None:
        """A cross at the top, and a dotted line, where a rank's metric was NaN."""
        if rank not in self._marks:
            (self._marks[rank],) = self.axes.plot(
                [],
                [],
                transform=self.axes.get_xaxis_transform(),
                color=self._styles[rank]["color"],
                ls=":",
                lw=1.2,
                marker="X",
                ms=8,
                markeredgecolor="white",
                markevery=[1],
                clip_on=False,
            )
        self._marks[rank].set_data([step, step], [0.0, 1.0])

    def _points(self, curves: Curves, rank: int) -> Points:
        steps, values = curves.curve(rank, self.metric).points()
        return steps, values / self._unit

    def _smooth(self, values: np.ndarray) -> np.ndarray:
        return smooth(values / self._unit, SMOOTHING * len(values))

    # ---- limits ----

    def data_limits(self) -> Limits | None:
        """Least and greatest value that is to be seen, as a power of ten on a log
        scale; None where there is none."""
        values = [line.get_ydata() for line in (*self.lines.values(), self.worst)]
        values.append(self.band.get_xy()[:, 1])
        joined = np.concatenate([np.asarray(each, dtype=float) for each in values])
        # Differences of such values are to be finite as well.
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


def use_log_scale(axes: Axes) -> None:
    """A log scale with plain numbers; what is not above 0 is left out."""
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
