"""Draws a run as matplotlib figures: its curves, and its memory by component."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image

from labkit.notebook.collector import Collector
from labkit.records import COMPONENTS
from labkit.records import shorten

# Okabe and Ito's colours, told apart by the colour-blind too; black comes last.
RANK_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#000000",
)
MAX_POINTS = 1000
PARTS = COMPONENTS[:-1]
PART_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#BBBBBB")
PART_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "master_parameters": "fp32 master copy",
    "communication_buffers": "buffers",
    "activations_peak": "activations",
}
MIB = 2**20
_INK = "#333333"

Limits = tuple[float, float]


class RunFigure(Figure):
    """A figure that any notebook shows as a PNG, without pyplot."""

    def _repr_png_(self) -> bytes:
        return to_png(self)


class RunPlot:
    """Loss and memory per rank, side by side; kept, and updated in place.

    Axes, ticks and text are four fifths of the work of drawing. They are drawn when
    their limits change, and the limits leave room to grow; in between, only the
    curves are drawn, over a copy of all the rest, and the palette is kept.
    """

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.figure = RunFigure(figsize=(9.0, 3.1), dpi=100, facecolor="white")
        self._canvas = FigureCanvasAgg(self.figure)
        # Fixed margins: tight_layout would take longer than all the rest.
        self.figure.subplots_adjust(
            left=0.075, right=0.9, top=0.86, bottom=0.17, wspace=0.24
        )
        self._title = self.figure.text(0.075, 0.94, "", fontsize=10, color=_INK)
        self._loss = self.figure.add_subplot(1, 2, 1)
        self._memory = self.figure.add_subplot(1, 2, 2)
        for axes, label in ((self._loss, "loss"), (self._memory, "memory (MiB)")):
            dress(axes, "optimizer step", label)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        self._lines: dict[tuple[Axes, int], Line2D] = {}
        for place, rank in enumerate(collector.ranks):
            colour = RANK_COLOURS[place % len(RANK_COLOURS)]
            # Ranks that lie on each other are seen to be two.
            style = "-" if place == 0 else (0, (4, 1 + place))
            for axes in (self._loss, self._memory):
                (line,) = axes.plot([], [], color=colour, lw=1.4, ls=style)
                line.set_label(f"rank {rank}")
                self._lines[axes, rank] = line
        self._memory.legend(
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            fontsize=8,
            ncols=1 + (len(collector.ranks) - 1) // 16,
        )
        self._limits: tuple[Limits, ...] = ((0.0, 0.0),) * 3
        self._background: Any = None
        self._palette: Palette | None = None

    def update(
        self, title: str, *, num_steps: int | None = None, is_final: bool = False
    ) -> None:
        """Bring the figure up to what the collector holds.

        The axes reach to `num_steps` where the length of the run is known, and fit
        the data closely when it is over.
        """
        self._title.set_text(title)
        for rank in self.collector.ranks:
            losses = self.collector.series(rank, "loss")
            self._lines[self._loss, rank].set_data(
                *thin(losses["step"], losses["value"])
            )
            every = self.collector.records(rank)
            self._lines[self._memory, rank].set_data(
                *thin(every["step"], every["memory_bytes"] / 2**20)
            )
        wanted = self._wanted_limits(0 if is_final else num_steps or 0)
        limits = wanted if is_final else tuple(map(roomy, self._limits, wanted))
        if limits != self._limits or is_final:
            self._limits = limits
            self._background = None
            (_, last), *heights = limits
            for axes, (low, high) in zip(
                (self._loss, self._memory), heights, strict=True
            ):
                margin = 0.05 * (high - low) or 0.05
                axes.set_xlim(-0.03 * last, 1.03 * last)
                axes.set_ylim(low - margin if low else 0.0, high + 2 * margin)

    def add_bars(self) -> Axes:
        """Room for bars to the right of the curves, in a figure that is wider."""
        self.figure.set_size_inches(12.6, 3.1)
        self.figure.subplots_adjust(left=0.054, right=0.9)
        height = {"bottom": 0.17, "height": 0.69}
        for axes, left in ((self._loss, 0.054), (self._memory, 0.347)):
            axes.set_position((left, height["bottom"], 0.235, height["height"]))
        self._title.set_x(0.054)
        self._background = None
        bars = self.figure.add_axes((0.7, height["bottom"], 0.18, height["height"]))
        dress(bars, "rank", "memory by component (MiB)")
        return bars

    def _wanted_limits(self, num_steps: int) -> tuple[Limits, ...]:
        """What must be seen: the steps, the losses, the memory."""
        steps = max([num_steps, *self._data(0)], default=0)
        loss = self._data(1, self._loss) or [0.0, 1.0]
        memory = self._data(1, self._memory) or [0.0, 1.0]
        # From 0 where that does not flatten the curve, so that it need not move as
        # the loss falls; memory always, so that a change looks as large as it is.
        lowest = 0.0 if 0 <= loss[0] < 0.7 * loss[1] else loss[0]
        return (
            (0.0, float(steps or 1)),
            (lowest, loss[1]),
            (0.0, memory[1] or 1.0),
        )

    def png(self) -> bytes:
        """The figure as it is, drawn with as little work as it takes."""
        curves = [self._title, *self._lines.values()]
        if self._background is None:
            for artist in curves:
                artist.set_visible(False)
            self._canvas.draw()
            self._background = self._canvas.copy_from_bbox(self.figure.bbox)
            self._palette = None
            for artist in curves:
                artist.set_visible(True)
        self._canvas.restore_region(self._background)
        for artist in curves:
            artist.draw(self._canvas.get_renderer())
        pixels = np.asarray(self._canvas.buffer_rgba())
        if self._palette is None:
            self._palette = Palette(pixels)
        return self._palette.encode(pixels)

    def _data(self, dim: int, axes: Axes | None = None) -> list[float]:
        """Least and greatest finite x (dim 0) or y (1) of the curves, if any."""
        values = [
            line.get_data()[dim]
            for (place, _), line in self._lines.items()
            if axes in (None, place)
        ]
        joined = np.concatenate(values).astype(float)
        # Differences of such values are to be finite as well.
        finite = joined[np.abs(joined) < 1e300]
        return [float(finite.min()), float(finite.max())] if len(finite) else []


def roomy(now: Limits, wanted: Limits) -> Limits:
    """The limits `now` while they hold `wanted` and it fills two fifths of them at
    least; otherwise `wanted`, and as much again where it has grown."""
    low, high = wanted
    fills_enough = high - low >= 0.4 * (now[1] - now[0])
    if now[0] <= low and high <= now[1] and fills_enough:
        return now
    return low, high + (high - low if high > now[1] else 0.0)


def dress(axes: Axes, x_label: str, y_label: str) -> None:
    """The look that all of labkit's axes share."""
    axes.set_xlabel(x_label, fontsize=9, color=_INK)
    axes.set_ylabel(y_label, fontsize=9, color=_INK)
    axes.tick_params(labelsize=8, colors=_INK)
    axes.grid(True, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def stack_memory(axes: Axes, table: pd.DataFrame, *, theory: Sequence[int]) -> None:
    """One bar for each row of `table`, in bytes by component, stacked.

    A black line marks the greatest total, which is less than the sum: components are
    at their greatest at different moments. Rows in `theory` are drawn pale.
    """
    places = np.arange(len(table))
    bottom = np.zeros(len(table))
    alphas = np.where(np.isin(places, theory), 0.45, 1.0)
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        heights = table.get(part, pd.Series(0.0, table.index)).fillna(0.0) / MIB
        if not heights.any():
            continue
        bars = axes.bar(
            places,
            heights,
            0.72,
            bottom=bottom,
            color=colour,
            label=PART_LABELS[part],
        )
        for bar, alpha in zip(bars, alphas, strict=True):
            bar.set_alpha(float(alpha))
        bottom += heights.to_numpy()
    if "total_peak" in table:
        totals = table["total_peak"] / MIB
        axes.hlines(
            totals, places - 0.36, places + 0.36, color="black", lw=1.6, label="peak"
        )
    axes.set_xticks(places, [shorten(str(label), 14) for label in table.index])
    axes.set_xlim(-0.6, len(table) - 0.4)
    axes.grid(visible=False, axis="x")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=8,
    )


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `MAX_POINTS` points that keep every peak: the least and greatest of
    each stretch, in order."""
    stretch = -(-2 * len(x) // MAX_POINTS)
    if stretch <= 2:
        return x, y
    # The last stretch is filled up with its last value.
    filled = np.append(y, np.full(-len(y) % stretch, y[-1]))
    blocks = filled.reshape(-1, stretch)
    starts = np.arange(0, len(y), stretch)
    # NaN must not hide a block's other values, and a block of NaN stays one.
    low = starts + np.argmin(np.where(np.isnan(blocks), np.inf, blocks), axis=1)
    high = starts + np.argmax(np.where(np.isnan(blocks), -np.inf, blocks), axis=1)
    keep = np.unique(np.concatenate([low, high, [len(y) - 1]]))
    keep = keep[keep < len(y)]
    return x[keep], y[keep]


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG, drawn anew."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    return Palette(pixels).encode(pixels)


class Palette:
    """The 64 colours that suit a picture best; encodes it and others like it.

    To find them costs more than all the rest of encoding. A PNG with a palette has
    half the size of a full one.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        """`pixels`: (height, width, 4), 8 bits a channel."""
        image = Image.fromarray(pixels).convert("RGB")
        found = image.quantize(
            64, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
        )
        self._colours = found.getpalette() or []
        colours = np.array(self._colours, dtype=np.int32).reshape(-1, 3)
        # The nearest colour to each of 4096: four bits a channel are enough to tell.
        cube = np.indices((16, 16, 16)).reshape(3, -1, 1) * 17
        distances = ((cube - colours.T[:, None, :]) ** 2).sum(axis=0)
        self._nearest = distances.argmin(axis=1).astype(np.uint8)

    def encode(self, pixels: np.ndarray) -> bytes:
        """`pixels`, (height, width, 4), as a PNG."""
        rgba = np.ascontiguousarray(pixels).view("<u4")[..., 0]
        code = (rgba & 0xF0) << 4 | rgba >> 8 & 0xF0 | rgba >> 20 & 0xF
        image = Image.fromarray(self._nearest[code])
        image.putpalette(self._colours)
        buffer = io.BytesIO()
        image.save(buffer, "png", compress_level=4)
        return buffer.getvalue()
