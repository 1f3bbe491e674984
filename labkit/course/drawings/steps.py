"""Draws the memory of a step: on a whiteboard, as measured, and by stage of ZeRO."""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patches import Rectangle

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.memory_bars import PART_COLOURS
from labkit.notebook.plots.memory_bars import PART_LABELS
from labkit.notebook.plots.memory_bars import put_legend_beside
from labkit.notebook.plots.memory_bars import stack_bars
from labkit.notebook.plots.step_memory import draw_moments
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import use_title
from labkit.records import memory_unit

STAGES = ("data parallel", "stage 1", "stage 2", "stage 3")
STATES = {"parameters": 3, "gradients": 2, "optimizer_state": 1}
"""The model states, and the stage of ZeRO that divides each by the number of ranks."""


def bytes_per_parameter(world_size: int) -> dict[str, list[float]]:
    """By model state: what a rank holds for each parameter, at each of `STAGES`.

    With Adam in fp32 that is 4 + 4 + 8 bytes.
    """
    return {
        state: [width / (world_size if place >= stage else 1) for place in range(4)]
        for (state, stage), width in zip(STATES.items(), (4, 4, 8), strict=True)
    }


def draw_stages(
    world_size: int, held: Sequence[Mapping[str, Mapping[str, float]]] = ()
) -> RunFigure:
    """Bytes for each parameter at each of `STAGES`: by the paper, and as measured.

    `held` has for each rank, by stage and model state, what was measured.
    """
    width = 9.6 if held else 8.2  # names below the bars need room
    figure = RunFigure(figsize=(width, 3.2), layout="constrained")
    axes = figure.add_subplot()
    formula = bytes_per_parameter(world_size)
    num_bars = 1 + len(held)
    columns: dict[str, list[float]] = {state: [] for state in STATES}
    labels = []
    for place, stage in enumerate(STAGES):
        labels += ["formula", *(f"rank {rank}" for rank in range(len(held)))]
        for state, heights in columns.items():
            heights += [formula[state][place], *(each[stage][state] for each in held)]
    stack_bars(axes, columns, PART_COLOURS, width=0.8)
    bars = [each for each in axes.patches if isinstance(each, Rectangle)]
    for place, bar in enumerate(bars):
        index = place % (num_bars * len(STAGES))
        bar.set_x(bar.get_x() + 0.7 * (index // num_bars))
        if held and index % num_bars == 0:
            bar.set_alpha(0.4)
    totals = np.sum([*columns.values()], axis=0)
    ticks = [index + 0.7 * (index // num_bars) for index in range(len(totals))]
    for x, total in zip(ticks, totals, strict=True):
        axes.text(x, total + 0.3, f"{total:.3g}", ha="center", fontsize=9, color=INK)
    style_axes(axes, "", "bytes for each parameter, on a rank")
    axes.grid(visible=False, axis="x")
    axes.set(ylim=(0, 19.5), xlim=(-0.7, ticks[-1] + 0.7))
    if held:
        axes.set_xticks(ticks, labels, rotation=90 if len(held) > 2 else 0, fontsize=8)
    else:
        axes.set_xticks([])
    for place, stage in enumerate(STAGES):
        middle = sum(ticks[place * num_bars : (place + 1) * num_bars]) / num_bars
        axes.text(middle, 18.2, stage, ha="center", fontsize=10, color=INK)
    put_legend_beside(axes, is_reversed=True)
    return figure


def draw_step(activations: float = 4.0) -> RunFigure:
    """What tensors hold within one step, as one draws it on a whiteboard.

    Adam's state is twice the parameters, the activations are `activations` times.
    """
    figure = RunFigure(figsize=(7.4, 3.1), layout="constrained")
    axes = figure.add_subplot()
    moments = [0.0, 1.0, 2.0, 3.0]
    parts = {
        "parameters": [1.0, 1.0, 1.0, 1.0],
        "optimizer_state": [2.0, 2.0, 2.0, 2.0],
        "gradients": [0.0, 0.0, 1.0, 1.0],
        "activations": [0.0, activations, 0.0, 0.0],
    }
    heights = np.array([*parts.values()])
    colours = [PART_COLOURS[part] for part in parts]
    axes.stackplot(moments, heights, colors=colours, lw=0)
    for moment in moments[1:3]:
        axes.axvline(moment, color=INK, lw=0.7, ls=":")
    top = 3 + activations
    for place, phase in enumerate(("forward", "backward", "optimizer step")):
        axes.text(place + 0.5, 1.1 * top, phase, ha="center", color=INK, fontsize=10)
    axes.annotate(
        "peak",
        (1, top),
        (1.5, 0.97 * top),
        color=INK,
        va="center",
        fontsize=10,
        arrowprops={"arrowstyle": "->", "color": INK},
    )
    style_axes(axes, "moments of one step", "bytes held by tensors")
    axes.set(xlim=(0, 3), ylim=(0, 1.08 * top), xticks=[], yticks=[])
    _name_parts(axes, [*parts])
    return figure


def draw_steps(moments_by_run: Mapping[str, pd.DataFrame]) -> RunFigure:
    """What tensors held within one step of each run, side by side on one scale.

    Each is a `Run.step_memory`, of which the rank with the highest peak is drawn.
    """
    shown = [part for part in PART_COLOURS if part != "activations_peak"]
    chosen = {}
    for run, each in moments_by_run.items():
        place = int(each[shown].sum(axis=1).to_numpy().argmax())
        chosen[run] = each[each["rank"] == each["rank"].iloc[place]]
    figure = RunFigure(figsize=(9.4, 2.9), layout="constrained")
    panels = figure.subplots(1, len(chosen), squeeze=False)[0]
    peaks = [float(each[shown].sum(axis=1).max()) for each in chosen.values()]
    unit, name = memory_unit(max(peaks))
    for axes, (title, moments), peak in zip(panels, chosen.items(), peaks, strict=True):
        draw_moments(axes, moments, None)
        for words in [*axes.texts]:
            words.remove()
        # Each has its own unit; heights are put right by the ratio of the units.
        own = memory_unit(peak)[0]
        axes.set_ylim(0, 1.12 * max(peaks) / own)
        axes.axhline(peak / own, color=INK, lw=0.8, ls="--")
        is_first = axes is panels[0]
        axes.set_ylabel(f"held by tensors ({name})" if is_first else "")
        axes.yaxis.set_major_formatter(lambda y, _, own=own: f"{y * own / unit:g}")
        axes.tick_params(labelleft=is_first)
        use_title(axes, f"{title}\npeak {peak / unit:.3g} {name}")
    held = pd.concat([*chosen.values()])[shown].max()
    _name_parts(panels[-1], [part for part in shown if held[part] > 0.02 * max(peaks)])
    return figure


def _name_parts(axes: Axes, parts: Sequence[str]) -> None:
    """A legend beside the axes, in the order in which the parts are stacked."""
    patches = [
        Patch(color=PART_COLOURS[part], label=PART_LABELS.get(part, part))
        for part in reversed(parts)
    ]
    axes.legend(
        handles=patches,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=9,
    )
