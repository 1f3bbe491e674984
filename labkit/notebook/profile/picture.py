"""Draws what every rank does within a step: a lane for each."""

from collections.abc import Mapping
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from labkit.notebook.history.collector import of_peak_rank
from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.step_memory import draw_moments
from labkit.notebook.plots.style import SMALL
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import use_title
from labkit.notebook.profile.parts import Spans
from labkit.notebook.profile.parts import StepParts
from labkit.notebook.profile.trace import Trace

COLOURS = {
    "data": "#CC79A7",
    "compute": "#4878a8",
    "communication": "#c9803a",
    "other": "#dddddd",
}
LABELS = {
    "data": "waiting for data",
    "compute": "compute",
    "communication": "communication, not hidden",
    "other": "other (Python, sleep)",
}
UNDER_WAY = "collective in progress"
PIXELS = 1600
"""Across: what is less than one apart is drawn as one."""
HEAD, FOOT = 0.95, 0.55
"""Inches above the lanes, for the title and two rows of a legend that can be read where
a page shows the picture at half its width; and below."""
TITLE, MEMORY, LEGEND = 0.65, 1.5, 0.5
"""Inches of what tensors hold, above it and below, where the legend has two rows."""


def draw_lanes(
    traces: Sequence[Trace],
    parts: Mapping[int, Sequence[StepParts]],
    name: str,
    memory: pd.DataFrame,
) -> RunFigure:
    """The step of median length, on all ranks, from where the first begins it; below
    what tensors hold, where `memory` as of `Run.step_memory` has it."""
    first = sorted(range(len(traces[0].steps)), key=lambda i: parts_of(parts, 0)[i])
    place = first[len(first) // 2]
    chosen = {rank: steps[place] for rank, steps in parts.items() if place < len(steps)}
    lanes = 0.6 * len(chosen)
    below = 0.0 if memory.empty else TITLE + MEMORY + FOOT + LEGEND
    height = HEAD + lanes + FOOT + below
    figure = RunFigure(figsize=(7.0, height), dpi=125)
    place_of_lanes = (0.1, (FOOT + below) / height, 0.87, lanes / height)
    _draw_parts(figure.add_axes(place_of_lanes), traces, chosen, name)
    if below:
        bottom = (FOOT + LEGEND) / height
        axes = figure.add_axes((0.1, bottom, 0.77, MEMORY / height))
        moments = of_peak_rank(memory)
        draw_moments(axes, moments, None)
        step, rank = (moments[each].iloc[0] for each in ("step", "rank"))
        title = f"memory of rank {rank} in step {step:,}, which measuring slows down"
        use_title(axes, title, pad=17)
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(0.0, -0.27),
            ncols=4,
            frameon=False,
            fontsize=SMALL,
            columnspacing=1.0,
            handlelength=1.2,
        )
    return figure


def _draw_parts(
    axes: Axes, traces: Sequence[Trace], chosen: Mapping[int, StepParts], name: str
) -> None:
    """A lane for each rank."""
    began = min(each.step.began for each in chosen.values())
    span = max(each.step.ended for each in chosen.values()) - began
    by_rank = {trace.rank: trace for trace in traces}
    for lane, (rank, step) in enumerate(chosen.items()):
        for part, spans in step.spans.items():
            bars = in_ms(spans, began, span)
            axes.broken_barh(bars, (lane - 0.4, 0.6), color=COLOURS[part], lw=0)
        collectives = [
            (max(each.began, step.step.began), min(each.ended, step.step.ended))
            for each in by_rank[rank].messages
            if not each.is_between_two
            and each.began < step.step.ended
            and each.ended > step.step.began
        ]
        bars = in_ms(sorted(collectives), began, span)
        axes.broken_barh(bars, (lane + 0.24, 0.12), color="#333333", lw=0)
    style_axes(axes, "ms from the start of the step", "")
    number = next(iter(chosen.values())).step.number
    use_title(axes, f"{name}: step {number:,}", pad=44)
    axes.set_xlim(0, span / 1e3)
    axes.set_yticks(range(len(chosen)), [f"rank {rank}" for rank in chosen])
    axes.set_ylim(len(chosen) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    colours = [*COLOURS.values(), "#333333"]
    axes.legend(
        [axes.barh(0, 0, color=colour) for colour in colours],
        [*LABELS.values(), UNDER_WAY],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=3,
        frameon=False,
        fontsize=SMALL,
        columnspacing=1.0,
        handlelength=1.2,
    )


def parts_of(parts: Mapping[int, Sequence[StepParts]], place: int) -> list[float]:
    """How long each step took on the rank at this place."""
    steps = list(parts.values())[place]
    return [each.seconds for each in steps]


def in_ms(spans: Spans, began: float, length: float) -> list[tuple[float, float]]:
    """As (start, width) in milliseconds, those that one could not tell apart joined."""
    found: list[tuple[float, float]] = []
    apart = length / PIXELS / 1e3
    for start, stop in spans:
        at, end = (start - began) / 1e3, (stop - began) / 1e3
        if found and at - (found[-1][0] + found[-1][1]) < apart / 4:
            found[-1] = found[-1][0], max(found[-1][1], end - found[-1][0])
        else:
            found.append((at, end - at))
    return found
