"""Draws a run's curves, by rank, as a picture that is kept and updated."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.notebook.history.collector import Collector
from labkit.notebook.history.curves import MEMORY
from labkit.notebook.plots.figure import Palette
from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.figure import to_png
from labkit.notebook.plots.panel import Limits
from labkit.notebook.plots.panel import Panel
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import WARNING_INK
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import style_of
from labkit.records import MIB
from labkit.records import shorten

# Of a run's picture, in inches.
WIDTH, HEIGHT, ROW_HEIGHT = 9.0, 3.1, 2.1
LEFT, BOTTOM, TALL, LOW = 0.675, 0.527, 2.14, 1.4
NUM_COLUMNS, COLUMN_WIDTH = 3, 2.72
BARS_COLUMNS = 2
"""What the bars and their legend take of a row."""
MAX_EXTRA = 6
"""Panels beside those of loss and memory."""


class RunPlot:
    """Loss and memory per rank, side by side, and a panel for each further metric in
    rows below; kept, and updated in place.

    Axes, ticks and legend are four fifths of the work of drawing. They are drawn when
    their limits change, and the limits leave room to grow; in between, only curves
    and words are drawn, over a copy of all the rest, and the palette is kept: 20 to
    70 ms a refresh, where the whole took 85 to 175 ms.
    """

    def __init__(self, collector: Collector, *, log_scale: bool = False) -> None:
        self.collector = collector
        self.figure = RunFigure(figsize=(WIDTH, HEIGHT), dpi=100, facecolor="white")
        self._canvas = FigureCanvasAgg(self.figure)
        self._title = self.figure.text(0.0, 0.0, "", fontsize=10, color=INK)
        self._remarks = self.figure.text(
            0.0, 0.0, "", fontsize=9, color=WARNING_INK, parse_math=False
        )
        self._more = self.figure.text(0.0, 0.0, "", fontsize=8, color=INK, ha="right")
        self._bars: Axes | None = None
        self.panels: dict[str, Panel] = {}
        self._add_panel("loss", "loss", log_scale=log_scale)
        self._add_panel(MEMORY, "memory (MiB)", unit=MIB, has_mean=False)
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
        marks: Mapping[int, str] | None = None,
        is_final: bool = False,
    ) -> None:
        """Bring the figure up to what the collector holds.

        `remarks` stand out below the title; `marks` are lines across all panels at
        these steps, with words in the first. The axes reach to `num_steps` where the
        length of the run is known, and fit the data closely when it is over.
        """
        self._is_final = is_final
        curves = self.collector.curves
        with curves.lock:
            curves.update(is_final=is_final)
            self._add_metrics(curves.metrics())
            for panel in self.panels.values():
                panel.update(curves)
        for text, line, size in (
            (self._title, title, 10.0),
            (self._remarks, "; ".join(remarks), 9.0),
        ):
            # A long line is set smaller, so that it ends within the figure.
            room = 1090 / size
            text.set(text=line, fontsize=size * min(1.0, room / max(1, len(line))))
        self._add_marks(marks or {})
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
            (_, last), *heights = limits
            for panel, (low, high) in zip(self.panels.values(), heights, strict=True):
                panel.axes.set_xlim(-0.03 * last, 1.03 * last)
                panel.set_limits(low, high)

    def add_bars(self) -> Axes:
        """Room for bars below the curves, where they leave some, or in a row more."""
        self._bars = self.figure.add_subplot()
        style_axes(self._bars, "rank", "")
        add_title(self._bars, "memory by component (MiB)")
        self._place()
        return self._bars

    # ---- panels ----

    def _add_metrics(self, metrics: Sequence[str]) -> None:
        new = [name for name in metrics if name not in self.panels]
        room = 2 + MAX_EXTRA - len(self.panels)
        for metric in new[:room]:
            self._add_panel(metric, "")
            add_title(self.panels[metric].axes, shorten(metric, 32))
        if new[room:]:
            self._more.set_text(f"{len(new[room:])} more metrics are in run.history")
        if new[:room]:
            self._place()

    def _add_panel(self, metric: str, label: str, **options: Any) -> None:
        axes = self.figure.add_subplot()
        self.panels[metric] = Panel(
            axes, metric, label, self.collector.ranks, **options
        )

    def _add_marks(self, marks: Mapping[int, str]) -> None:
        for panel in self.panels.values():
            if panel.mark_steps(marks, with_words=panel.metric == "loss"):
                self._background = None

    def _place(self) -> None:
        """Put everything in its place, in inches: tight_layout would take longer than
        all the rest."""
        loss, memory, *others = [panel.axes for panel in self.panels.values()]
        num_cells = len(others)
        if self._bars is not None:
            if num_cells % NUM_COLUMNS + BARS_COLUMNS > NUM_COLUMNS:
                num_cells = -(-num_cells // NUM_COLUMNS) * NUM_COLUMNS
            bars_cell, num_cells = num_cells, num_cells + BARS_COLUMNS
        num_rows = -(-num_cells // NUM_COLUMNS)
        height = HEIGHT + num_rows * ROW_HEIGHT
        self.figure.set_size_inches(WIDTH, height)
        base = height - HEIGHT + BOTTOM

        def put(axes: Axes, x: float, y: float, w: float, h: float) -> None:
            axes.set_position((x / WIDTH, y / height, w / WIDTH, h / height))

        def put_in_cell(axes: Axes, cell: int, w: float) -> None:
            row, column = divmod(cell, NUM_COLUMNS)
            x, y = LEFT + column * COLUMN_WIDTH, base - (row + 1) * ROW_HEIGHT
            put(axes, x, y, w, LOW)

        put(loss, LEFT, base, 3.315, TALL)
        put(memory, LEFT + 4.11, base, 3.315, TALL)
        for cell, axes in enumerate(others):
            put_in_cell(axes, cell, 1.985)
        if self._bars is not None:
            put_in_cell(self._bars, bars_cell, 3.2)
        for text, down in ((self._title, 0.19), (self._remarks, 0.36)):
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
            handles.append(Patch(color=loss.band.get_facecolor(), label="range"))
        if any(panel.has_middle for panel in self.panels.values()):
            label = "median" if loss.is_band else "mean"
            label = label if len(loss.lines) != 1 else "trend"
            handles.append(Line2D([], [], color=INK, lw=2.0, label=label))
        labels = [str(handle.get_label()) for handle in handles]
        if labels != self._legend:
            self._legend = labels
            memory.axes.legend(
                handles=handles,
                loc="center left",
                bbox_to_anchor=(1.0, 0.5),
                frameon=False,
                fontsize=8,
            )
            self._background = None

    def _wanted_limits(self, num_steps: int) -> tuple[Limits, ...]:
        """What must be seen: the steps, and the values of each panel."""
        last = max(panel.last_step() for panel in self.panels.values())
        heights = [self._wanted_heights(panel) for panel in self.panels.values()]
        return ((0.0, max(float(num_steps), last) or 1.0), *heights)

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


def add_title(axes: Axes, text: str) -> None:
    """Say what is drawn above it, where a long name has room; it may have any letters,
    and is no formula."""
    axes.set_title(text, loc="left", fontsize=9, color=INK, parse_math=False)


def roomy(now: Limits, wanted: Limits) -> Limits:
    """The limits `now` while they hold `wanted` and it fills two fifths of them at
    least; otherwise `wanted`, and as much again where it has grown."""
    low, high = wanted
    fills_enough = high - low >= 0.4 * (now[1] - now[0])
    if now[0] <= low and high <= now[1] and fills_enough:
        return now
    return low, high + (high - low if high > now[1] else 0.0)
