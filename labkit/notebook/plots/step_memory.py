"""Draws what tensors hold within one step: moment by moment, and by component."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from labkit.notebook.plots.memory_bars import PART_COLOURS
from labkit.notebook.plots.memory_bars import PART_LABELS
from labkit.notebook.plots.memory_bars import WORTH_DRAWING
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import SMALL
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import use_title
from labkit.records import COMPONENTS
from labkit.records import PARTS
from labkit.records import memory_unit
from labkit.records import significant

STATES = COMPONENTS[:4]
CHARACTER = 0.026
"""The width of a letter above the axes, as a share of theirs."""


def draw_moments(axes: Axes, moments: pd.DataFrame, theory: pd.Series | None) -> None:
    """The parts stacked over the moments of one step of one rank.

    `moments` are rows of `Run.step_memory`; `theory` has bytes by component, of which
    the model states together are a line.
    """
    milliseconds = 1000 * moments["seconds"].to_numpy()
    end = max(float(milliseconds[-1]), 1e-6)
    held = moments[[*PARTS]].to_numpy(dtype=float).T
    total = held.sum(axis=0)
    peak = float(total.max())
    unit, name = memory_unit(peak)
    rank, step = moments["rank"].iloc[0], moments["step"].iloc[0]
    style_axes(axes, "ms within the step", f"held by tensors ({name})")
    use_title(axes, f"step {step:,} of rank {rank}", pad=17)
    bottom = np.zeros(len(total))
    for part, values in zip(PARTS, held / unit, strict=True):
        if values.max() > WORTH_DRAWING * peak / unit:
            axes.fill_between(
                milliseconds,
                bottom,
                bottom + values,
                step="post",
                color=PART_COLOURS[part],
                label=PART_LABELS.get(part, part),
                lw=0,
            )
            bottom = bottom + values
    _name_phases(axes, moments["phase"].tolist(), milliseconds)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.06 * peak / unit)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(visible=False, axis="x")
    beside = {f"peak\n{significant(peak / unit)}": peak / unit}
    states = float("nan") if theory is None else float(theory.reindex(STATES).sum())
    if states > 0:
        axes.axhline(states / unit, color="black", lw=1.3, ls=(0, (4, 2)))
        beside["states by\ntheory"] = states / unit
    _write_beside(axes, beside)


def _name_phases(axes: Axes, phases: list[str], milliseconds: np.ndarray) -> None:
    """Above the axes; where each begins a thin line."""
    begins = [i for i in range(len(phases)) if not i or phases[i] != phases[i - 1]]
    for begin in begins[1:]:
        axes.axvline(milliseconds[begin], color=INK, lw=0.7, ls=":")
    names = [phases[begin] for begin in begins]
    if (num_microbatches := names.count("backward")) > 1:
        names, begins = [f"{num_microbatches} x (forward, backward), then step"], [0]
    ends = milliseconds[[*begins[1:], len(phases) - 1]]
    centres = (milliseconds[begins] + ends) / 2 / milliseconds[-1]
    left = 0.0
    for place, name in enumerate(names):
        width = CHARACTER * (len(name) + 1)
        # As much to the left as leaves room for those that follow.
        room = 1.0 - CHARACTER * sum(len(each) + 1 for each in names[place:])
        left = min(max(left, centres[place] - width / 2), max(left, room))
        axes.text(
            *(left, 1.02, name), transform=axes.transAxes, fontsize=SMALL, color=INK
        )
        left += width


def _write_beside(axes: Axes, heights: dict[str, float]) -> None:
    """Words at the right of the axes, each at its height; none over another."""
    low, high = axes.get_ylim()
    room = 0.22 * (high - low)
    above = high + room
    for words, height in sorted(heights.items(), key=lambda each: -each[1]):
        place = min(height, above - room)
        above = place
        axes.annotate(
            words,
            (1.015, place),
            xycoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=SMALL,
            color=INK,
            annotation_clip=False,
        )


def draw_components(
    axes: Axes, memory: pd.DataFrame, theory: pd.Series | None, others: float
) -> None:
    """A bar for the most of each component, one below it for what theory says.

    `memory` has bytes by rank and component: the bar is that of the rank with most, a
    thin line goes from the least to the most. `others` are bytes of tensors that are
    older than the step.
    """
    most, least = memory.max(), memory.min()
    rows = {
        part: (float(most[part]), float(least[part]))
        for part in COMPONENTS[:-1]
        if most[part] > 0 or (theory is not None and theory.get(part, 0.0) > 0)
    }
    if others > WORTH_DRAWING * float(most["total_peak"]):
        rows["other"] = others, others
    expected = {part: 0.0 if theory is None else theory.get(part, 0.0) for part in rows}
    greatest = max([high for high, _ in rows.values()] + [*expected.values(), 1.0])
    # In the unit of the step beside it, whose peak is more than each component.
    unit, name = memory_unit(max(greatest, float(most["total_peak"])))
    style_axes(axes, name, "")
    ranges = {
        part: (low / unit, high / unit)
        for part, (high, low) in rows.items()
        if high - low > 0.01 * greatest
    }
    use_title(axes, "by component", pad=17)
    keys = ["pale: theory"] * any(expected.values())
    keys += ["line: lowest to highest rank"] * bool(ranges)
    axes.text(
        *(0.0, 1.02, ", ".join(keys)),
        transform=axes.transAxes,
        fontsize=SMALL,
        color=INK,
    )
    for place, (part, (high, _)) in enumerate(rows.items()):
        colour, said = PART_COLOURS[part], expected[part]
        thickness, centre = (0.4, place + 0.2) if said else (0.6, place)
        axes.barh(centre, high / unit, thickness, color=colour)
        if said:
            axes.barh(place - 0.2, said / unit, 0.4, color=colour, alpha=0.4)
        if part in ranges:
            axes.hlines(centre, *ranges[part], color="black", lw=1.2)
        axes.annotate(
            f"{significant(high / unit)}",
            (max(high, said) / unit, centre),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=INK,
        )
    names = PART_LABELS | {"activations_peak": "activations kept"}
    labels = [names.get(part, part) for part in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xlim(0, 1.16 * greatest / unit)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(visible=False, axis="y")
