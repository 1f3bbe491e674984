"""Draws a study: the metric of every trial, and their values."""

import math
import textwrap
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import LogLocator
from matplotlib.ticker import MaxNLocator
from matplotlib.ticker import NullLocator

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.figure import to_png
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import LARGE
from labkit.notebook.plots.style import MEDIUM
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import use_title

BEST, FINISHED, PRUNED, FAILED, RUNNING = (
    RANK_COLOURS[5],
    RANK_COLOURS[0],
    "#b8b8b8",
    "#333333",
    RANK_COLOURS[1],
)
LOOKS: dict[str, dict[str, Any]] = {
    "finished": {"color": FINISHED, "lw": 1.0, "alpha": 0.75, "zorder": 2},
    "pruned": {"color": PRUNED, "lw": 0.9, "alpha": 0.9, "zorder": 1},
    "failed": {"color": FAILED, "lw": 0.9, "alpha": 0.7, "zorder": 1, "ls": ":"},
    "running": {"color": RUNNING, "lw": 1.6, "zorder": 3},
}
TITLE_WIDTH = 72
"""In letters."""
MARKS = {"finished": "o", "pruned": "v", "failed": "x", "running": "o"}


@dataclass(frozen=True)
class Line:
    """One trial."""

    trial: int
    state: str
    points: list[tuple[int, float]]
    value: float


@dataclass(frozen=True)
class StudyDrawing:
    """A picture of a study, yet to be drawn, in whatever process."""

    title: str
    metric: str
    is_max: bool
    lines: list[Line]
    best: int | None

    def png(self) -> bytes:
        """Drawn."""
        return to_png(self.figure())

    def figure(self) -> RunFigure:
        """Left: the curves, pruned ones pale, the best in front. Right: the values, and
        the best so far."""
        # Small, so that its letters can be read where a page shows it in 450 pixels.
        figure = RunFigure(figsize=(7.5, 4.2))
        curves = figure.add_axes((0.08, 0.26, 0.50, 0.51))
        values = figure.add_axes((0.67, 0.26, 0.31, 0.51))
        self._draw_curves(curves)
        self._draw_values(values)
        limits = self._limits()
        if limits is not None:
            curves.set_ylim(*limits)
            values.set_ylim(*limits)
        title = textwrap.wrap(self.title, TITLE_WIDTH, max_lines=2, placeholder=" …")
        figure.text(
            *(0.08, 0.87, "\n".join(title)),
            va="bottom",
            fontsize=LARGE,
            color=INK,
            parse_math=False,
        )
        self._draw_legend(figure, values)
        return figure

    def _draw_curves(self, axes: Any) -> None:
        style_axes(axes, "logged values (log scale)", "")
        use_title(axes, f"{self.metric} by trial", size=MEDIUM)
        for line in self.lines:
            look = LOOKS[line.state]
            if line.trial == self.best:
                look = {"color": BEST, "lw": 2.2, "zorder": 4}
            if line.points:
                x, y = zip(*line.points, strict=True)
                single = {"marker": "o", "ms": 3} if len(x) == 1 else {}
                axes.plot(x, y, **look, **single)
        if any(line.points for line in self.lines):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:,.10g}")
            axes.xaxis.set_minor_locator(NullLocator())

    def _draw_values(self, axes: Any) -> None:
        style_axes(axes, "trial", "")
        use_title(axes, f"final {self.metric}", size=MEDIUM)
        for state, mark in MARKS.items():
            ours = [x for x in self.lines if x.state == state and x.trial != self.best]
            at = [line.trial for line in ours]
            found = [line.value for line in ours]
            if state == "failed":  # it has none: at the foot
                axes.plot(
                    *(at, [0.02] * len(at), mark),
                    transform=axes.get_xaxis_transform(),
                    color=FAILED,
                    ms=5,
                    label="failed",
                )
            elif state != "running":
                label = f"{state}"
                axes.plot(at, found, mark, color=LOOKS[state]["color"], label=label)
        done = [x for x in self.lines if x.state == "finished"]
        if self.best is not None:
            choose = max if self.is_max else min
            so_far = [choose(x.value for x in done[: n + 1]) for n in range(len(done))]
            axes.step(
                [line.trial for line in done],
                so_far,
                where="post",
                color=BEST,
                lw=1.2,
                label="best so far",
            )
            [best] = [x for x in done if x.trial == self.best]
            axes.plot([best.trial], [best.value], "*", color=BEST, ms=12, label="best")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlim(-0.5, max((line.trial for line in self.lines), default=0) + 0.5)

    def _draw_legend(self, figure: RunFigure, axes: Any) -> None:
        """Below, for both."""
        handles, labels = axes.get_legend_handles_labels()
        kept = {
            label: handle
            for handle, label in zip(handles, labels, strict=True)
            if len(handle.get_xdata())
        }
        if kept:
            figure.legend(
                list(kept.values()),
                list(kept),
                loc="lower center",
                ncols=len(kept),
                columnspacing=1.2,
                handletextpad=0.5,
                frameon=False,
                fontsize=LARGE,
            )

    def _limits(self) -> tuple[float, float] | None:
        """Around what finished and where curves began: one that diverged is not to
        flatten the others."""
        usual = [x.value for x in self.lines if x.state == "finished"]
        usual += [x.points[0][1] for x in self.lines if x.points]
        usual = sorted(value for value in usual if math.isfinite(value))
        if not usual:
            return None
        middle = usual[len(usual) // 10 : len(usual) - len(usual) // 10]
        low, high = min(usual[0], middle[0]), max(middle)
        if self.is_max:
            low, high = min(middle), max(usual[-1], middle[-1])
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return low - margin, high + margin
