"""Draws a run that goes on elsewhere, resumed or as a script, and where losses join."""

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import SMALL
from labkit.notebook.plots.style import WARNING_INK
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import use_title


def draw_recovery(*, every: int, died_at: int, num_steps: int) -> RunFigure:
    """A run with a checkpoint `every` so many steps that dies, and the one that
    resumes from the last checkpoint."""
    figure = RunFigure(figsize=(8.4, 2.1))
    axes = figure.add_axes((0.12, 0.3, 0.85, 0.62))
    resumed = died_at // every * every
    axes.barh(1, died_at, 0.34, color=RANK_COLOURS[0])
    axes.barh(1, died_at - resumed, 0.34, left=resumed, color="white", hatch="////")
    axes.barh(0, num_steps - resumed, 0.34, left=resumed, color=RANK_COLOURS[0])
    for row, steps in (
        (1, range(every, died_at + 1, every)),
        (0, range(resumed + every, num_steps + 1, every)),
    ):
        axes.plot([*steps], [row] * len(steps), "D", color=INK, ms=6)
    axes.plot(died_at, 1, "X", color=WARNING_INK, ms=11)
    axes.annotate(
        "",
        (resumed, 0.2),
        (resumed, 0.86),
        arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.5},
    )
    words: dict[str, Any] = {
        "ha": "left",
        "va": "center",
        "fontsize": SMALL,
        "color": INK,
    }
    axes.text(
        died_at + 0.025 * num_steps,
        1,
        "a rank dies; the hatched steps are lost",
        **words,
    )
    axes.text(resumed + 4, 0.5, "resume from the last checkpoint", **words)
    style_axes(axes, "optimizer step", "")
    axes.set_yticks([1, 0], ["first run", "second run"])
    axes.set(xlim=(0, num_steps), ylim=(-0.5, 1.5))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid(visible=False)
    return figure


def draw_join(
    losses: Mapping[str, pd.Series],
    around: int,
    *,
    width: int = 25,
    near_is: str = "where they join",
) -> RunFigure:
    """The losses of runs by step: all of them, and some `width` steps on either side of
    the one at which they join.

    The first is the reference: broad and grey, the others thin on it. `near_is` is the
    title of the second picture.
    """
    figure = RunFigure(figsize=(9.0, 3.1))
    whole, near = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1, 1.25)})
    figure.subplots_adjust(left=0.075, right=0.82, top=0.88, bottom=0.17, wspace=0.2)
    for place, (name, series) in enumerate(losses.items()):
        colour = "#CCCCCC" if not place else RANK_COLOURS[place + 3]
        style: dict[str, Any] = {"color": colour, "lw": (7.0, 3.4, 1.3)[min(place, 2)]}
        style["label"] = name
        whole.plot(series.index, series.to_numpy(), **style)
        part = series.loc[around - width : around + width]
        near.plot(part.index, part.to_numpy(), **style)
    style_axes(whole, "optimizer step", "loss")
    style_axes(near, "optimizer step", "")
    use_title(whole, "the whole runs")
    use_title(near, near_is)
    near.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=SMALL
    )
    return figure


def draw_diff(cell: str, script: str) -> RunFigure:
    """What a script has more (green) and less (red) than the cell it comes from."""
    lines = [
        line
        for line in difflib.ndiff(cell.splitlines(), script.splitlines())
        if line[2:].strip() and not line.startswith("?")
    ]
    figure = RunFigure(figsize=(8.4, 0.17 * len(lines)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 1), ylim=(len(lines), 0))
    axes.axis("off")
    paper = {"+": "#DDF4DD", "-": "#F8DCDC", " ": "white"}
    for place, line in enumerate(lines):
        axes.axhspan(place, place + 1, color=paper[line[0]], lw=0)
        axes.text(
            0.01,
            place + 0.5,
            line,
            va="center",
            fontsize=SMALL,
            family="monospace",
            color=INK,
            parse_math=False,
        )
    return figure


def draw_apart(losses: Mapping[str, list[float]], first_step: int) -> RunFigure:
    """How far the losses of runs are from those of the first one, step by step, on a
    log axis: what is equal is on the floor."""
    figure = RunFigure(figsize=(7.6, 2.9))
    axes = figure.add_axes((0.11, 0.18, 0.6, 0.7))
    (_, reference), *others = losses.items()
    floor = 1e-9
    steps = np.arange(first_step, first_step + len(reference))
    for place, (name, values) in enumerate(others):
        apart = np.abs(np.subtract(values, reference))
        style: dict[str, Any] = {"color": RANK_COLOURS[place + 4], "ms": 4, "lw": 1.3}
        axes.plot(steps, np.maximum(apart, floor), "o-", label=name, **style)
    style_axes(axes, "optimizer step", "distance of the losses")
    axes.set_yscale("log")
    axes.set_ylim(floor / 3, 3)
    axes.set_yticks([floor, 1e-6, 1e-3, 1], ["0", "1e-6", "1e-3", "1"])
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=SMALL
    )
    return figure
