"""Draws the passes of a batch through the stages of a pipeline."""

import pandas as pd

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import SMALL
from labkit.notebook.plots.style import ink_on
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import use_title
from labkit.theory import bubble

COLOURS = {"forward": "#4878a8", "backward": "#c9803a"}
NUMBERED_SHARE = 0.016
"""Of the width, that a pass takes at least to have its number written in it."""


def measured_bubble(table: pd.DataFrame) -> float:
    """The share of a batch's time in which ranks have no pass, as their mean."""
    took = table["ended"] - table["began"]
    span = table["ended"].max() - table["began"].min()
    return float(1 - took.groupby(table["rank"]).sum().mean() / span)


def plot_schedule(table: pd.DataFrame, name: str) -> RunFigure:
    """A lane for each rank of `table`, which is as of `Run.schedule`: the passes with
    the numbers of their microbatches, and what is left, the bubble."""
    ranks = sorted(table["rank"].unique())
    height = 1.35 + 0.52 * len(ranks)
    figure = RunFigure(figsize=(8.8, height))
    axes = figure.add_axes((0.1, 0.55 / height, 0.87, (height - 1.15) / height))
    span = float(table["ended"].max())
    stages = table["stage"].nunique()
    chunks = int(table.groupby("rank")["stage"].nunique().max())
    for row in table.to_dict("records"):
        began, width = 1e3 * row["began"], 1e3 * (row["ended"] - row["began"])
        lane = ranks.index(row["rank"])
        later = row["stage"] // (stages // chunks)  # of a rank's stages
        axes.barh(
            lane,
            width,
            0.8,
            began,
            color=COLOURS[row["kind"]],
            alpha=0.9 - 0.35 * later,
            ec="white",
            lw=0.6,
        )
        if width > NUMBERED_SHARE * 1e3 * span:
            axes.text(
                *(began + width / 2, lane),
                str(row["microbatch"]),
                ha="center",
                va="center",
                fontsize=SMALL,
                color=ink_on(COLOURS[row["kind"]]) if later == 0 else INK,
            )
    style_axes(axes, "ms from the first pass of the batch", "")
    num_microbatches = int(table["microbatch"].max()) + 1
    expected = bubble(stages // chunks, num_microbatches, chunks)
    use_title(
        axes,
        f"{name}: {stages} stages, {num_microbatches} microbatches; ranks wait "
        f"{measured_bubble(table):.0%} of the time, by formula {expected:.0%}",
    )
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    handles = [axes.barh(0, 0, color=colour) for colour in COLOURS.values()]
    axes.legend(
        handles,
        [f"{kind} pass of a microbatch" for kind in COLOURS],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.18 if len(ranks) < 3 else 1.1),
        ncols=2,
        frameon=False,
        fontsize=SMALL,
    )
    return figure
