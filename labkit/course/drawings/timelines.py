"""Draws what runs are in time: losses, distances, lanes, times against sizes."""

import re
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator
from matplotlib.ticker import LogLocator
from matplotlib.ticker import NullFormatter
from matplotlib.ticker import NullLocator
from matplotlib.ticker import ScalarFormatter

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.schedule_plot import COLOURS as PASS_COLOURS
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import ink_on
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import style_of

CARDS = (24, 40, 80, 141)
MARKERS = "osD^v"


def fit_alpha_beta(
    num_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
    """The alpha, in seconds, and beta, in bytes a second, with which alpha + n / beta
    is nearest to the measured seconds, each weighed by its own size."""
    sizes, times = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    rows = np.stack([1 / times, sizes / times], axis=1)
    scale = rows.max(axis=0)
    found = np.linalg.lstsq(rows / scale, np.ones(len(times)), rcond=None)[0] / scale
    alpha, per_byte = np.maximum(found, 1e-15)
    return float(alpha), float(1 / per_byte)


def draw_times(
    num_bytes: Sequence[float], seconds_by_name: Mapping[str, Sequence[float]]
) -> RunFigure:
    """Measured seconds against message size, and the line alpha + n / beta of each."""
    figure = RunFigure(figsize=(7.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    sizes = np.geomspace(min(num_bytes), max(num_bytes), 200)
    for place, (name, seconds) in enumerate(seconds_by_name.items()):
        colour = RANK_COLOURS[place % len(RANK_COLOURS)]
        alpha, beta = fit_alpha_beta(num_bytes, seconds)
        told = (
            f"{name}\n$\\alpha$ = {1e6 * alpha:.0f} µs, "
            f"$\\beta$ = {beta / 1e9:.1f} GB/s"
        )
        milliseconds = 1e3 * np.asarray(seconds)
        axes.plot(num_bytes, milliseconds, "o", color=colour, ms=5, label=told)
        axes.plot(sizes, 1e3 * (alpha + sizes / beta), color=colour, lw=1.3)
        knee = alpha * beta
        if min(num_bytes) < knee < max(num_bytes):
            axes.plot(knee, 2e3 * alpha, "D", mfc="white", mec=colour, ms=7)
    axes.plot([], [], "D", mfc="white", mec=INK, ms=7, label=r"half of it is $\alpha$")
    style_axes(axes, "size of the message", "time of the call (ms)")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xscale("log", base=2)
    axes.set_xticks(num_bytes[::2], [_in_words(each) for each in num_bytes[::2]])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return figure


def _in_words(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:g} GiB"


def draw_losses(history: pd.DataFrame, first: int, last: int) -> RunFigure:
    """The loss of each rank in the steps `first` to `last` of a run, and their mean."""
    figure = RunFigure(figsize=(7.4, 2.8), layout="constrained")
    axes = figure.add_subplot()
    losses = history[history.step.between(first, last)].pivot(
        index="step", columns="rank", values="loss"
    )
    for rank, loss in losses.items():
        colour = RANK_COLOURS[int(str(rank)) % len(RANK_COLOURS)]
        axes.plot(loss, ".-", color=colour, lw=1, label=f"rank {rank}")
    axes.plot(losses.mean(axis=1), color=INK, lw=2.2, label="mean")
    style_axes(axes, "step", "loss")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return figure


def draw_distances(distances: Mapping[str, Sequence[float]]) -> RunFigure:
    """How far apart weights are after each step, on a log axis that has a 0 below."""
    figure = RunFigure(figsize=(8.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    above_0 = [each for line in distances.values() for each in line if each > 0]
    floor = 0.03 * min(above_0, default=1.0)
    for place, (name, line) in enumerate(distances.items()):
        style = style_of(place)
        values = np.maximum(np.asarray(line, dtype=float), floor)
        axes.plot(range(1, len(values) + 1), values, lw=2, label=name, **style)
    style_axes(axes, "step", "distance between weights")
    axes.set_yscale("log")
    powers = np.arange(np.ceil(np.log10(floor * 10)), np.log10(max(above_0, default=1)))
    shown = powers[:: max(1, len(powers) // 5)]
    axes.set_yticks(
        [floor, *10.0**shown], ["exactly 0", *(f"$10^{{{p:.0f}}}$" for p in shown)]
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return figure


def draw_seconds(seconds: Mapping[str, float]) -> RunFigure:
    """A bar for each name, as long as the seconds that it takes."""
    figure = RunFigure(figsize=(7.4, 0.8 + 0.35 * len(seconds)), layout="constrained")
    axes = figure.add_subplot()
    names, values = list(seconds), [1e3 * each for each in seconds.values()]
    bars = axes.barh(names, values, color=RANK_COLOURS[0], height=0.6)
    axes.bar_label(bars, fmt=" %.3g ms", fontsize=9, color=INK)
    style_axes(axes, "time (ms)", "")
    axes.set_yticks(range(len(names)), names)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    return figure


def draw_memory_against_gpus(
    tables: Mapping[str, pd.DataFrame], *, cards: tuple[int, ...] = CARDS
) -> RunFigure:
    """Draw the memory of a rank against the number of GPUs, a line for each strategy.

    Parameters
    ----------
    tables : dict of str to DataFrame
        By the title of a panel: bytes, by number of GPUs (rows) and strategy (columns).
    cards : tuple of int
        Memories of GPUs, in GB, at which a line is drawn; that at 80 is the thick one.
    """
    figure = RunFigure(figsize=(9.0, 3.7))
    figure.subplots_adjust(left=0.08, right=0.86, top=0.9, bottom=0.15, wspace=0.18)
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for panel, (title, table) in zip(panels, tables.items(), strict=True):
        label = "memory of a rank (GB)" if panel is panels[0] else ""
        style_axes(panel, "GPUs", label)
        for place, strategy in enumerate(table):
            panel.plot(
                table.index,
                table[strategy] / 1e9,
                color=RANK_COLOURS[place],
                marker=MARKERS[place % len(MARKERS)],
                ms=5,
                label=strategy,
            )
        panel.set(xscale="log", yscale="log", title=title)
        panel.xaxis.set_major_locator(FixedLocator(list(table.index)))
        highest = table.to_numpy().max() / 1e9
        ticks = [x for x in (5, 10, 20, 40, 80, 160, 320, 640, 1280) if x < 2 * highest]
        panel.yaxis.set_major_locator(FixedLocator(ticks))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(ScalarFormatter())
        for card in cards:
            is_ours = card == 80
            panel.axhline(card, color=INK, lw=1.6 if is_ours else 0.6, ls="--")
        if panel is panels[-1]:
            for card in cards:
                panel.annotate(
                    f"{card} GB",
                    (1.01, card),
                    xycoords=("axes fraction", "data"),
                    fontsize=8,
                    va="center",
                    weight="bold" if card == 80 else "normal",
                )
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper right",
        frameon=False,
        fontsize=9,
        bbox_to_anchor=(1.0, 0.92),
    )
    return figure


def draw_predicted_and_measured(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> RunFigure:
    """Draw two bars for each strategy, of bytes: what was predicted is pale.

    Parameters
    ----------
    predicted, measured : dict of str to float
        Bytes of the fullest rank at its peak, by strategy.
    """
    figure = RunFigure(figsize=(6.6, 2.8))
    figure.subplots_adjust(left=0.1, right=0.8, top=0.95, bottom=0.12)
    axes = figure.subplots()
    style_axes(axes, "", "peak of a rank (MiB)")
    places = np.arange(len(measured))
    values = [predicted[name] / 2**20 for name in measured]
    axes.bar(places - 0.2, values, 0.38, color="#9ecae1", label="predicted")
    values = [each / 2**20 for each in measured.values()]
    axes.bar(places + 0.2, values, 0.38, color="#0072B2", label="measured")
    axes.set_xticks(places, list(measured))
    axes.grid(visible=False, axis="x")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return figure


def draw_lanes(
    blocks_by_rank: Sequence[Sequence[tuple[str, str, float, float]]],
    title: str = "",
    *,
    unit: str = "time in the step (ms)",
    colours: Sequence[str] = RANK_COLOURS,
) -> RunFigure:
    """What each rank does when, in a lane for each kind of work.

    A block is its lane, what is written in it where there is room, and the seconds at
    which it begins and ends, on one clock; the first begins at 0. Blocks of a lane that
    overlap are drawn below each other.
    """
    first = min(b[2] for blocks in blocks_by_rank for b in blocks)
    lanes = list(dict.fromkeys(b[0] for blocks in blocks_by_rank for b in blocks))
    num_lanes = len(lanes) * len(blocks_by_rank)
    figure = RunFigure(figsize=(10.4, 0.9 + 0.42 * num_lanes), layout="constrained")
    axes = figure.add_subplot()
    latest = max(b[3] for blocks in blocks_by_rank for b in blocks) - first
    names: list[str] = []
    for rank, blocks in enumerate(blocks_by_rank):
        colour = np.array(to_rgb(colours[rank % len(colours)]))
        for place, lane in enumerate(lanes):
            y = len(names)
            names.append(f"rank {rank}: {lane}")
            own = sorted((b for b in blocks if b[0] == lane), key=lambda b: b[2])
            rows: list[float] = []  # where each row of this lane is free again
            placed = []
            for _, label, began, ended in own:
                row = next((n for n, free in enumerate(rows) if free <= began), None)
                if row is None:
                    row = len(rows)
                    rows.append(0.0)
                rows[row] = ended
                placed.append((row, label, began, ended))
            height = 0.8 / max(1, len(rows))
            for row, label, began, ended in placed:
                left, width = 1e3 * (began - first), 1e3 * (ended - began)
                pale = 0.45 * colour + 0.55 if place else colour
                low = y - 0.4 + row * height
                axes.add_patch(
                    Rectangle((left, low), width, height, fc=pale, ec="white", lw=0.8)
                )
                if (ended - began) * 110 > latest * (len(label) + 1) and height > 0.3:
                    ink = ink_on(pale)
                    middle = (left + width / 2, low + height / 2)
                    axes.text(*middle, label, ha="center", va="center", **_TINY, c=ink)
    style_axes(axes, unit, "")
    axes.set(xlim=(0, 1.02e3 * latest), ylim=(num_lanes - 0.5, -0.5))
    axes.set_yticks(range(num_lanes), names)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    return figure


_TINY: dict[str, Any] = {"fontsize": 8}


def draw_overlap(num_ranks: int) -> RunFigure:
    """A schematic: messages after the backward pass, and messages during it."""
    compute = [("compute", "forward", 0.0, 3.0)]
    compute += [
        ("compute", f"layer {3 - k}", 3.0 + 2 * k, 5.0 + 2 * k) for k in (0, 1, 2)
    ]
    after = [("messages", "all gradients", 9.0, 13.5)]
    during = [
        ("messages", f"layer {3 - k}", 5.0 + 2 * k, 6.5 + 2 * k) for k in (0, 1, 2)
    ]
    figure = draw_lanes(
        [compute + after, compute + during],
        unit="time (no scale)",
        colours=["#666666"],
    )
    axes = figure.axes[0]
    axes.set_yticks(
        range(4),
        [
            "one after the other:\ncompute",
            "messages",
            "overlapped:\ncompute",
            "messages",
        ],
    )
    axes.set_xticks([])
    axes.set_title(f"each of {num_ranks} ranks", loc="left", fontsize=10, color=INK)
    return figure


def draw_passes(
    passes: Mapping[str, Sequence[Sequence[Any]]],
) -> RunFigure:
    """When each rank had which microbatch: by title the passes of all ranks, each as
    (kind, rank, microbatch, began, ended) in seconds. All panels have one scale."""
    heights = [len({each[1] for each in rows}) for rows in passes.values()]
    figure = RunFigure(
        figsize=(8.8, sum(0.75 + 0.36 * n for n in heights)), layout="constrained"
    )
    grid = figure.subplots(
        len(passes),
        1,
        sharex=True,
        squeeze=False,
        height_ratios=[1 + n for n in heights],
    )
    firsts = [min(each[3] for each in rows) for rows in passes.values()]
    ends = [max(each[4] for each in rows) for rows in passes.values()]
    longest = max(end - first for first, end in zip(firsts, ends, strict=True))
    for axes, (title, rows), first, end in zip(
        grid[:, 0], passes.items(), firsts, ends, strict=True
    ):
        ranks = sorted({each[1] for each in rows})
        for kind, rank, microbatch, began, ended in rows:
            left, width = 1e3 * (began - first), 1e3 * (ended - began)
            colour = PASS_COLOURS[kind]
            axes.barh(rank, width, 0.8, left, color=colour, ec="white", lw=0.8)
            if (ended - began) * 55 > longest:
                middle = (left + width / 2, rank)
                ink = ink_on(colour)
                axes.text(*middle, microbatch, ha="center", va="center", **_TINY, c=ink)
        busy = sum(each[4] - each[3] for each in rows) / len(ranks)
        waits = f"{title}: ranks wait {1 - busy / (end - first):.0%} of the time"
        style_axes(axes, "", "")
        axes.set_title(waits, loc="left", fontsize=10, color=INK)
        axes.set(xlim=(0, 1.01e3 * longest), ylim=(len(ranks) - 0.5, -0.5))
        axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        axes.grid(visible=False, axis="y")
    grid[-1, 0].set_xlabel("time (ms)", fontsize=10, color=INK)
    handles = [Rectangle((0, 0), 1, 1, color=each) for each in PASS_COLOURS.values()]
    figure.legend(
        handles,
        [f"{kind} pass of a microbatch" for kind in PASS_COLOURS],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    return figure


def draw_pipelines(num_ranks: int, num_microbatches: int) -> RunFigure:
    """A schematic: a batch that passes through all stages whole, and one that does in
    microbatches."""
    from labkit.course.layers import timetable  # imports torch

    panels = {}
    for title, number in {
        "the whole batch": 1,
        f"{num_microbatches} microbatches": num_microbatches,
    }.items():
        order = [(kind, n) for kind in PASS_COLOURS for n in range(number)]
        found = timetable([order] * num_ranks, pass_s=num_microbatches / number)
        panels[title] = [astuple(each) for each in found]
    return _without_scale(draw_passes(panels))


def draw_order(
    order: Callable[[int, int, int], Sequence[tuple[str, int]]],
    num_ranks: int,
    num_microbatches: int,
) -> RunFigure:
    """The passes of ranks of which each has `order(rank, num_ranks, num_microbatches)`,
    as ("forward", 0), ("backward", 0), ...; ValueError where they wait forever."""
    from labkit.course.layers import timetable  # imports torch

    orders = [order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    title = f"{num_ranks} ranks, {num_microbatches} microbatches"
    return _without_scale(
        draw_passes({title: [astuple(each) for each in timetable(orders)]})
    )


def _without_scale(figure: RunFigure) -> RunFigure:
    figure.axes[-1].set_xticks([])
    figure.axes[-1].set_xlabel("time (no scale)")
    return figure


def draw_speed_up(
    widths: Sequence[int], speed_ups: Mapping[str, Mapping[str, Sequence[float]]]
) -> RunFigure:
    """For each title a panel: how often faster than one rank, against model width."""
    figure = RunFigure(figsize=(10.4, 3.6), layout="constrained")
    panels = figure.subplots(1, len(speed_ups), sharey=True, squeeze=False)[0]
    for axes, (title, lines) in zip(panels, speed_ups.items(), strict=True):
        axes.axhline(1, color=INK, lw=1.2)
        for place, (name, line) in enumerate(lines.items()):
            marker = "" if place else "o"
            axes.plot(widths, line, marker=marker, lw=2, label=name, **style_of(place))
        style_axes(axes, "width of the model", "")
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [f"{width:,}" for width in widths])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title, loc="left", fontsize=10, color=INK)
    highest = max(max(line) for lines in speed_ups.values() for line in lines.values())
    panels[0].set_ylim(0, 1.08 * highest)
    panels[0].set_ylabel("times as fast as one rank", fontsize=10, color=INK)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_busiest(
    size: float, measured: Mapping[str, tuple[int, float]], most_ranks: int = 32
) -> RunFigure:
    """Bytes that the busiest rank sends and receives in a step, by formula, against the
    number of ranks; `measured` are those of runs, by name.

    `size` are the bytes of the gradients. Of S servers each has 1/S of them.
    """
    figure = RunFigure(figsize=(8.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    ranks = np.arange(2, most_ranks + 1)
    lines = {
        "parameter server, 1 server": 2 * (ranks - 1),
        "parameter server, 4 servers": np.where(
            ranks > 4, np.maximum(2.0, 2 * (ranks - 4) / 4), np.nan
        ),
        "all-reduce, as a ring": 4 * (ranks - 1) / ranks,
    }
    for place, (name, line) in enumerate(lines.items()):
        axes.plot(ranks, line, lw=2, label=name, color=RANK_COLOURS[place])
    for place, (name, (num_ranks, num_bytes)) in enumerate(measured.items()):
        times = num_bytes / size
        marker = MARKERS[place % len(MARKERS)]
        axes.plot(num_ranks, times, marker, color=INK, ms=7, label=f"measured: {name}")
    style_axes(axes, "number of ranks", "bytes in and out of the busiest rank")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g} P")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return figure


WINDOW = 20


def loss_by_time(history: pd.DataFrame) -> pd.DataFrame:
    """The losses of all ranks in the order of time, each the mean of the last ones:
    seconds and loss."""
    found = history.dropna(subset=["loss"]).sort_values("seconds")
    smooth = found["loss"].rolling(WINDOW, min_periods=WINDOW).mean()
    return found.assign(loss=smooth)[["seconds", "loss"]].dropna()


def seconds_to(history: pd.DataFrame, loss: float) -> float:
    """When the loss was first as low as that; infinite where it never was."""
    found = loss_by_time(history)
    return float(found[found["loss"] <= loss]["seconds"].min(skipna=True) or np.inf)


def draw_losses_by_time(
    histories: Mapping[str, pd.DataFrame], loss: float
) -> RunFigure:
    """The loss of runs against time, and when each first comes down to `loss`."""
    figure = RunFigure(figsize=(7.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(loss, color="#999999", lw=1, ls="--")
    for place, (name, history) in enumerate(histories.items()):
        found, colour = loss_by_time(history), RANK_COLOURS[place]
        axes.plot(found["seconds"], found["loss"], lw=2, label=name, color=colour)
        axes.plot(seconds_to(history, loss), loss, "o", ms=7, color=colour)
    style_axes(axes, "time (s)", "loss")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return figure


def draw_writing(losses: pd.Series, samples: Mapping[int, str]) -> RunFigure:
    """The loss by step, and beside it what the model wrote before some of the steps."""
    figure = RunFigure(figsize=(10.4, 0.36 * len(samples) + 1.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2.1))
    left.plot(losses.index, losses, lw=1.5, color="#999999")
    style_axes(left, "step", "loss")
    right.set_axis_off()
    right.set(xlim=(0, 1), ylim=(len(samples) + 0.5, -0.7))
    for x, title in ((0, "step"), (0.09, "loss"), (0.18, "it writes")):
        right.text(x, -0.3, title, fontsize=9, weight="bold", color=INK)
    for row, (step, text) in enumerate(samples.items()):
        loss, colour = losses.loc[step], RANK_COLOURS[row % len(RANK_COLOURS)]
        left.plot(step, loss, "o", ms=6, color=colour)
        shown = re.sub(r"[^ -~]", "·", text)
        right.text(0, row + 0.6, f"{step}", fontsize=9, weight="bold", color=colour)
        right.text(0.09, row + 0.6, f"{loss:.2f}", fontsize=9, color=INK)
        right.text(
            *(0.18, row + 0.6, shown),
            fontsize=8.5,
            color=INK,
            family="monospace",
            parse_math=False,
        )
    return figure
