"""Draws memory by component as stacked bars."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from labkit.records import COMPONENTS
from labkit.records import MIB
from labkit.records import shorten

PART_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer_state": "#009E73",
    "master_parameters": "#56B4E9",
    "communication_buffers": "#CC79A7",
    "activations_peak": "#BBBBBB",
}
PART_LABELS = {
    "optimizer_state": "optimizer state",
    "master_parameters": "fp32 master copy",
    "communication_buffers": "buffers",
    "activations_peak": "activations",
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
        fontsize=8,
    )


def stack_memory(axes: Axes, table: pd.DataFrame, *, theory: Sequence[int]) -> None:
    """One bar for each row of `table`, in bytes by component, stacked.

    A black line marks the greatest total, which is less than the sum: components are
    at their greatest at different moments. Rows in `theory` are drawn pale.
    """
    places = np.arange(len(table))
    parts = [part for part in COMPONENTS[:-1] if part in table]
    stack_bars(
        axes, {part: table[part] / MIB for part in parts}, PART_COLOURS, width=0.72
    )
    for bars in axes.containers:
        for place in theory:
            bars[place].set_alpha(0.45)
    if "total_peak" in table:
        totals = table["total_peak"] / MIB
        axes.hlines(
            totals, places - 0.36, places + 0.36, color="black", lw=1.6, label="peak"
        )
    axes.set_xticks(places, [shorten(str(label), 14) for label in table.index])
    axes.set_xlim(-0.6, len(table) - 0.4)
    axes.grid(visible=False, axis="x")
    put_legend_beside(axes, is_reversed=True)
