"""Draws bytes as stacked bars: memory by component, gradients by bucket."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import SMALL
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import use_title
from labkit.records import PARTS
from labkit.records import memory_unit
from labkit.records import significant

# Tol's muted colours, which the colour-blind distinguish too, and which are none of
# those of ranks and runs.
PART_COLOURS = {
    "parameters": "#332288",
    "gradients": "#CC6677",
    "optimizer_state": "#44AA99",
    "master_parameters": "#88CCEE",
    "communication_buffers": "#AA4499",
    "activations_peak": "#DDCC77",
    "activations": "#DDCC77",
    "other": "#BBBBBB",
}
WORTH_DRAWING = 0.005
"""Of all: a part that is nowhere more is left out."""
LETTER = 0.0105
"""The width of a letter, as a share of a picture of buckets."""
PART_LABELS = {
    "optimizer_state": "optimizer state",
    "master_parameters": "fp32 master copy",
    "communication_buffers": "buffers",
    "activations_peak": "activations",
    "other": "older tensors",
}


def stack_bars(
    axes: Axes, parts: Mapping[str, Any], colours: Mapping[str, str], *, width: float
) -> None:
    """One bar for each place, the parts on each other; (num_bars,) heights each.

    NaN counts as nothing, and a part that is nowhere has no label.
    """
    bottom: Any = 0.0
    for part, values in parts.items():
        heights = np.nan_to_num(np.asarray(values, dtype=float))
        if heights.any():
            axes.bar(
                np.arange(len(heights)),
                heights,
                width,
                bottom=bottom,
                color=colours[part],
                label=PART_LABELS.get(part, part),
            )
        bottom = bottom + heights


def put_legend_beside(axes: Axes, *, is_reversed: bool = False) -> None:
    """A legend to the right; `is_reversed` has it in the order of what is stacked."""
    handles, labels = axes.get_legend_handles_labels()
    order = slice(None, None, -1) if is_reversed else slice(None)
    axes.legend(
        handles[order],
        labels[order],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=SMALL,
    )


def stack_peaks(axes: Axes, table: pd.DataFrame) -> None:
    """One bar for each row of `table`, bytes by `records.PARTS`, stacked: together they
    are what a rank holds when it holds most, which stands above."""
    totals = table.sum(axis=1)
    unit, name = memory_unit(float(totals.max()))
    parts = {
        part: table[part] / unit
        for part in PARTS
        if (table[part] > WORTH_DRAWING * totals).any()
    }
    stack_bars(axes, parts, PART_COLOURS, width=0.72)
    style_axes(axes, "", name)
    for place, total in enumerate(totals / unit):
        if total > 0:
            axes.annotate(
                f"{significant(total)}",
                (place, total),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=SMALL,
                color=INK,
            )
    axes.set_ylim(0, 1.12 * max(1e-6, totals.max() / unit))
    put_legend_beside(axes, is_reversed=True)


def plot_buckets(table: pd.DataFrame) -> RunFigure:
    """A bar for each bucket of `table`, which is as of `Run.buckets`: the gradients in
    it, with the names of those that have room for one."""
    sizes = table.groupby("bucket")["num_bytes"].sum()
    unit, name = memory_unit(float(sizes.max()))
    height = 0.9 + 0.32 * len(sizes)
    figure = RunFigure(figsize=(8.8, height))
    axes = figure.add_axes((0.1, 0.55 / height, 0.87, (height - 0.85) / height))
    longest = float(sizes.max()) / unit
    for bucket in sizes.index.to_list():
        rows = table[table["bucket"] == bucket]
        left = 0.0
        for place, row in enumerate(rows.itertuples()):
            width = float(row.num_bytes) / unit
            colour = RANK_COLOURS[place % 2]
            axes.barh(bucket, width, 0.7, left, color=colour, alpha=0.55, ec="white")
            if width > LETTER * len(str(row.parameter)) * longest:
                axes.text(
                    *(left + width / 2, bucket, str(row.parameter)),
                    ha="center",
                    va="center",
                    fontsize=SMALL,
                    color=INK,
                )
            left += width
    style_axes(axes, f"gradients ({name})", "bucket")
    use_title(axes, "what DDP sends together, the first bucket first")
    axes.set_yticks(sizes.index.to_list())
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure
