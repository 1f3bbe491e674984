"""Draws a run's curves, by rank, as a picture that is kept and updated."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.notebook.history.collector import Collector
from labkit.notebook.history.curves import MEMORY
from labkit.notebook.history.marks import Mark
from labkit.notebook.plots.figure import Palette
from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.figure import to_png
from labkit.notebook.plots.panel import Limits
from labkit.notebook.plots.panel import Panel
from labkit.notebook.plots.panel import style_of_mark
from labkit.notebook.plots.step_memory import draw_components
from labkit.notebook.plots.step_memory import draw_moments
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import LARGE
from labkit.notebook.plots.style import MEDIUM
from labkit.notebook.plots.style import SMALL
from labkit.notebook.plots.style import WARNING_INK
from labkit.notebook.plots.style import style_of
from labkit.notebook.plots.style import use_title
from labkit.records import shorten

# Of a run's picture, in inches.
WIDTH, HEIGHT, ROW_HEIGHT = 9.0, 3.3, 2.2
LEFT, BOTTOM, TALL, LOW = 0.72, 0.56, 2.1, 1.4
LOSS_WIDTH, MEMORY_LEFT, MEMORY_WIDTH = 3.0, 4.52, 2.85
NUM_COLUMNS, COLUMN_WIDTH = 3, 2.72
STEP_HEIGHT, STEP_TALL = 2.75, 1.72
"""Of the row with what tensors hold within a step."""
MAX_EXTRA = 6
"""Panels beside those of loss and memory."""
WHY_EMPTY = {
    "loss": "no loss: none was given\nto backward() or to log(loss=...)",
    MEMORY: "not measured:\ntoo few optimizer steps",
}
"""What stands in a panel that is empty when the run is over."""
MAX_MARKS = 4
"""In the legend."""


class RunPlot:
    """Loss and memory per rank, side by side, and a panel for each further metric in
    rows below; kept, and updated in place.

    Axes, ticks and legend are four fifths of the work of drawing. They are drawn when
    their limits change, and the limits leave room to grow; in between, only curves
    and words are drawn, over a copy of all the rest, and the palette is kept: 20 to
    70 ms a refresh, where the whole took 85 to 175 ms.
    """

    def __init__(
        self, collector: Collector, *, log_scale: bool = False, memory_is: str = ""
    ) -> None:
        """`memory_is` says what the memory at a step is."""
        self.collector = collector
        self.figure = RunFigure(figsize=(WIDTH, HEIGHT))
        self._canvas = FigureCanvasAgg(self.figure)
        self._title = self.figure.text(0.0, 0.0, "", fontsize=LARGE, color=INK)
        self._remarks = self.figure.text(
            0.0, 0.0, "", fontsize=MEDIUM, color=WARNING_INK, parse_math=False
        )
        self._more = self.figure.text(
            0.0, 0.0, "", fontsize=SMALL, color=INK, ha="right"
        )
        self._moments: Axes | None = None
        self._components: Axes | None = None
        self._marks: list[Mark] = []
        self.panels: dict[str, Panel] = {}
        self._add_panel("loss", "loss", log_scale=log_scale)
        self._add_panel(MEMORY, "memory of tensors", has_mean=False)
        use_title(self.panels[MEMORY].axes, memory_is, size=SMALL)
        self._why_empty = {
            metric: self.panels[metric].axes.text(
                *(0.5, 0.5, ""),
                transform=self.panels[metric].axes.transAxes,
                ha="center",
                va="center",
                fontsize=SMALL,
                color=INK,
            )
            for metric in WHY_EMPTY
        }
        self._legend: list[str] = []
        self._update_legend()
        self._place()
        self._limits: tuple[Limits, ...] = ()
        self._is_final = False
        self._background: Any = None
        self._palette: Palette | None = None

    def update(
        self,
        title: str,
        *,
        remarks: Sequence[str] = (),
        num_steps: int | None = None,
        marks: Sequence[Mark] = (),
        is_final: bool = False,
    ) -> None:
        """Bring the figure up to what the collector holds.

        `remarks` stand out below the title; `marks` are lines across all panels. The
        axes reach to `num_steps` where the length of the run is known, and fit the data
        closely when it is over.
        """
        self._is_final = is_final
        curves = self.collector.curves
        with curves.lock:
            curves.update(is_final=is_final)
            self._add_metrics(curves.metrics())
            for panel in self.panels.values():
                if panel.update(curves):
                    self._background = None
        for text, line, size in (
            (self._title, title, LARGE),
            (self._remarks, "; ".join(remarks), MEDIUM),
        ):
            # A long line is set smaller, so that it ends within the figure.
            room = 1090 / size
            text.set(text=line, fontsize=size * min(1.0, room / max(1, len(line))))
        for metric, text in self._why_empty.items():
            if is_final and not len(self.panels[metric].steps()):
                text.set_text(WHY_EMPTY[metric])
        self._add_marks(marks)
        self._update_legend()
        wanted = self._wanted_limits(0 if is_final else num_steps or 0)
        if is_final or len(self._limits) != len(wanted):
            limits = wanted
        else:
            limits = tuple(map(roomy, self._limits, wanted))
            if num_steps:  # nothing follows
                limits = (wanted[0], *limits[1:])
        if limits != self._limits or is_final:
            self._limits = limits
            self._background = None
            (first, last), *heights = limits
            margin = 0.03 * (last - first)
            for panel, (low, high) in zip(self.panels.values(), heights, strict=True):
                panel.axes.set_xlim(first - margin, last + margin)
                panel.set_limits(low, high)

    def add_memory(self, memory: pd.DataFrame, moments: pd.DataFrame) -> None:
        """Draw what tensors hold within a step, in a row more.

        `memory` is as of `Run.memory_beside_theory`, `moments` as of
        `Run.peak_moments`.
        """
        theory = None
        if "theory" in memory.index:
            theory = memory.T["theory"].fillna(0.0)
        ranks = memory.drop(index="theory", errors="ignore")
        others = 0.0
        if len(moments):
            others = float(moments["other"].max())
            self._moments = self.figure.add_subplot()
            draw_moments(self._moments, moments, theory)
        self._components = self.figure.add_subplot()
        draw_components(self._components, ranks, theory, others)
        self._place()

    # ---- panels ----

    def _add_metrics(self, metrics: Sequence[str]) -> None:
        new = [name for name in metrics if name not in self.panels]
        room = 2 + MAX_EXTRA - len(self.panels)
        for metric in new[:room]:
            self._add_panel(metric, "")
            panel = self.panels[metric]
            use_title(panel.axes, shorten(metric, 16 if panel.is_band else 28))
        if new[room:]:
            self._more.set_text(f"{len(new[room:])} more metrics are in run.history")
        if new[:room]:
            self._place()

    def _add_panel(self, metric: str, label: str, **options: Any) -> None:
        axes = self.figure.add_subplot()
        self.panels[metric] = Panel(
            axes, metric, label, self.collector.ranks, **options
        )

    def _add_marks(self, marks: Sequence[Mark]) -> None:
        self._marks = list(marks)
        for panel in self.panels.values():
            if panel.mark_steps(marks):
                self._background = None

    def _place(self) -> None:
        """Put everything in its place, in inches: tight_layout would take longer than
        all the rest."""
        loss, memory, *others = [panel.axes for panel in self.panels.values()]
        num_rows = -(-len(others) // NUM_COLUMNS)
        step_height = 0.0 if self._components is None else STEP_HEIGHT
        height = HEIGHT + num_rows * ROW_HEIGHT + step_height
        self.figure.set_size_inches(WIDTH, height)
        base = height - HEIGHT + BOTTOM

        def put(axes: Axes, x: float, y: float, w: float, h: float) -> None:
            axes.set_position((x / WIDTH, y / height, w / WIDTH, h / height))

        def put_in_cell(axes: Axes, cell: int, w: float) -> None:
            row, column = divmod(cell, NUM_COLUMNS)
            x, y = LEFT + column * COLUMN_WIDTH, base - (row + 1) * ROW_HEIGHT
            put(axes, x, y, w, LOW)

        put(loss, LEFT, base, LOSS_WIDTH, TALL)
        put(memory, MEMORY_LEFT, base, MEMORY_WIDTH, TALL)
        for cell, axes in enumerate(others):
            put_in_cell(axes, cell, 1.985)
        if self._moments is not None:
            put(self._moments, LEFT, BOTTOM, LOSS_WIDTH, STEP_TALL)
        if self._components is not None:
            put(self._components, 5.9, BOTTOM, 2.85, STEP_TALL)
        for text, down in ((self._title, 0.2), (self._remarks, 0.39)):
            text.set_position((LEFT / WIDTH, 1 - down / height))
        self._more.set_position(((WIDTH - 0.1) / WIDTH, 0.08 / height))
        self._background = None

    def _update_legend(self) -> None:
        loss, memory = self.panels["loss"], self.panels[MEMORY]
        handles: list[Any] = []
        for line in loss.lines.values():
            # Not the line itself, which may be pale.
            handle = Line2D([], [], color=line.get_color(), lw=1.4)
            handle.set(linestyle=style_of(len(handles))["ls"], label=line.get_label())
            handles.append(handle)
        if any(panel.has_range for panel in self.panels.values()):
            label = "lowest to highest"
            handles.append(Patch(color=loss.band.get_facecolor(), label=label))
        if any(panel.has_middle for panel in self.panels.values()):
            label = "median" if loss.is_band else "mean"
            label = f"{label}, smoothed" if len(loss.lines) != 1 else "smoothed"
            handles.append(Line2D([], [], color=INK, lw=2.0, label=label))
        for mark in self._marks[:MAX_MARKS]:
            handles.append(Line2D([], [], lw=1.0, **style_of_mark(mark)))
            handles[-1].set_label(mark.text)
        labels = [str(handle.get_label()) for handle in handles]
        if labels != self._legend:
            self._legend = labels
            memory.axes.legend(
                handles=handles,
                loc="center left",
                bbox_to_anchor=(1.0, 0.5),
                frameon=False,
                fontsize=SMALL,
                handlelength=1.5,
                handletextpad=0.6,
            )
            self._background = None

    def _wanted_limits(self, num_steps: int) -> tuple[Limits, ...]:
        """What must be seen: the steps, and the values of each panel."""
        steps = np.concatenate([panel.steps() for panel in self.panels.values()])
        first, last = (steps.min(), steps.max()) if len(steps) else (0.0, 0.0)
        # From 0, but of a run that has resumed: its steps alone.
        first = 0.0 if first < 0.1 * max(num_steps, last) else float(first)
        last = max(float(num_steps), float(last), first + 1.0)
        heights = [self._wanted_heights(panel) for panel in self.panels.values()]
        return ((first, last), *heights)

    def _wanted_heights(self, panel: Panel) -> Limits:
        low, high = panel.data_limits() or (0.0, 1.0)
        if panel.log_scale:
            return low, high
        if panel.metric == MEMORY:  # a change looks as large as it is
            return 0.0, high or 1.0
        # From 0 where that does not flatten the curve, so that it need not move as
        # the loss falls.
        return (0.0 if 0 <= low < 0.7 * high else low), high

    # ---- pixels ----

    def png(self) -> bytes:
        """The figure as it is, drawn with as little work as it takes."""
        if self._is_final:
            return to_png(self.figure)
        changing = [each for panel in self.panels.values() for each in panel.artists()]
        changing += [self._title, self._remarks]
        if self._background is None:
            for artist in changing:
                artist.set_visible(False)
            self._canvas = FigureCanvasAgg(self.figure)
            self._canvas.draw()
            self._background = self._canvas.copy_from_bbox(self.figure.bbox)
            self._palette = None
            for artist in changing:
                artist.set_visible(True)
        self._canvas.restore_region(self._background)
        for artist in changing:
            artist.draw(self._canvas.get_renderer())
        pixels = np.asarray(self._canvas.buffer_rgba())
        if self._palette is None:
            self._palette = Palette(pixels)
        return self._palette.encode(pixels)


def roomy(now: Limits, wanted: Limits) -> Limits:
    """The limits `now` while they hold `wanted` and it fills two fifths of them at
    least; otherwise `wanted`, and as much again where it has grown."""
    low, high = wanted
    fills_enough = high - low >= 0.4 * (now[1] - now[0])
    if now[0] <= low and high <= now[1] and fills_enough:
        return now
    return low, high + (high - low if high > now[1] else 0.0)
