"""Draws matrices that are cut among ranks, and what their products are."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS

SIDE = 0.17
"""Of an element, in inches."""
GREY = "#999999"
SAMPLES, DIM = 4, 4


class Row:
    """Matrices and signs from left to right, in the middle of a strip."""

    def __init__(self, axes: Axes, middle: float, top: float, title: str) -> None:
        self._axes, self._middle, self._x = axes, middle, 0.2
        axes.text(0.2, top, title, fontsize=10, weight="bold", color=INK, va="center")

    def matrix(
        self, rows: int, columns: int, name: str, colours: Sequence[str], by: str = ""
    ) -> None:
        """One that is cut `by` columns or rows, a part in each of `colours`."""
        left, bottom = self._x, self._middle - rows * SIDE / 2
        for row, column in np.ndindex(rows, columns):
            place, size = (column, columns) if by == "columns" else (row, rows)
            colour = colours[place * len(colours) // size] if by else colours[0]
            pale = 0.5 * np.array(to_rgb(colour)) + 0.5
            # The first row is at the top.
            at = left + column * SIDE, bottom + (rows - 1 - row) * SIDE
            box = Rectangle(at, SIDE, SIDE, fc=pale, ec="white", lw=0.8)
            self._axes.add_patch(box)
        self._x += columns * SIDE
        middle = (left + self._x) / 2
        self._write(middle, bottom - 0.15, name)

    def sign(self, text: str, width: float = 0.4) -> None:
        self._write(self._x + width / 2, self._middle, text)
        self._x += width

    def _write(self, x: float, y: float, text: str) -> None:
        self._axes.text(x, y, text, fontsize=9, color=INK, ha="center", va="center")


def draw_split_layers(num_ranks: int) -> RunFigure:
    """A product whose weight is cut by columns, one whose weight is cut by rows, and
    both one after the other.

    What every rank has is grey, and what one rank has is in its colour.
    """
    hidden = num_ranks * max(2, 6 // num_ranks)
    colours = [RANK_COLOURS[rank % len(RANK_COLOURS)] for rank in range(num_ranks)]
    elements = (num_ranks + 3) * DIM + 2 * hidden
    width = 0.4 + elements * SIDE + 2.85 + num_ranks * 0.4
    strip = hidden * SIDE + 0.85
    figure = RunFigure(figsize=(width, 3 * strip))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(0, 3 * strip))
    for rank, colour in enumerate(reversed(colours)):
        axes.text(
            *(width - 0.2 - 0.65 * rank, 3 * strip - 0.2),
            f"rank {num_ranks - 1 - rank}",
            fontsize=9,
            weight="bold",
            color=colour,
            ha="right",
            va="center",
        )

    def begin(turn: int, title: str) -> Row:
        bottom = (2 - turn) * strip
        return Row(axes, bottom + 0.3 + hidden * SIDE / 2, bottom + strip - 0.2, title)

    def partial_sums(row: Row, name: str) -> None:
        for rank, colour in enumerate(colours):
            row.sign("+" if rank else "=")
            row.matrix(SAMPLES, DIM, f"${name}_{{{rank}}}$", [colour])
        row.sign("all_reduce  →", 1.2)
        row.matrix(SAMPLES, DIM, f"${name}$", [GREY])

    row = begin(0, "by columns: each rank has some columns of Y")
    row.matrix(SAMPLES, DIM, "$X$", [GREY])
    row.sign("·")
    row.matrix(DIM, hidden, "$A$", colours, "columns")
    row.sign("=")
    row.matrix(SAMPLES, hidden, "$Y$", colours, "columns")
    row.sign("all_gather  →", 1.2)
    row.matrix(SAMPLES, hidden, "$Y$", [GREY])

    row = begin(1, "by rows: each rank has a summand of Z")
    row.matrix(SAMPLES, hidden, "$Y$", colours, "columns")
    row.sign("·")
    row.matrix(hidden, DIM, "$B$", colours, "rows")
    partial_sums(row, "Z")

    title = "one after the other: what the first leaves is what the second takes"
    row = begin(2, title)
    row.matrix(SAMPLES, DIM, "$X$", [GREY])
    row.sign("·")
    row.matrix(DIM, hidden, "$A$", colours, "columns")
    row.sign("→ gelu →", 0.85)
    row.matrix(SAMPLES, hidden, "$Y$", colours, "columns")
    row.sign("·")
    row.matrix(hidden, DIM, "$B$", colours, "rows")
    partial_sums(row, "Z")
    return figure
