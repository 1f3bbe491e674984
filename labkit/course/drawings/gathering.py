"""Draws which units of a sharded model are whole, and when."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import SMALL
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import use_title

MIB = 2**20
Moments = Sequence[tuple[str, Sequence[int]]]
"""The pass and the block of a moment, as "forward 3", and the bytes that each unit has
in full then."""


def draw_units(num_ranks: int, num_units: int, gathered: int) -> RunFigure:
    """What each rank holds of each unit: a shard of its own colour; all shards of the
    unit that is `gathered`, which is the one that is computed."""
    figure = RunFigure(figsize=(8.6, 0.9 + 0.55 * num_ranks))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(-1.1, num_units + 0.1), ylim=(num_ranks + 0.1, -0.9))
    text: dict[str, Any] = {"fontsize": SMALL, "color": INK, "va": "center"}
    for unit in range(num_units):
        word = "gathered, computed" if unit == gathered else f"unit {unit}"
        axes.text(unit + 0.45, -0.35, word, ha="center", **text)
        for rank in range(num_ranks):
            for shard in range(num_ranks):
                colour = np.array(to_rgb(RANK_COLOURS[shard % len(RANK_COLOURS)]))
                is_here = shard == rank or unit == gathered
                axes.add_patch(
                    Rectangle(
                        (unit + 0.9 * shard / num_ranks, rank + 0.12),
                        0.9 / num_ranks,
                        0.76,
                        fc=0.6 * colour + 0.4 if is_here else "white",
                        ec="#BBBBBB",
                        lw=0.6,
                    )
                )
    for rank in range(num_ranks):
        axes.text(-0.1, rank + 0.5, f"rank {rank}", ha="right", **text)
    return figure


def draw_gathered(runs: Mapping[str, tuple[Sequence[str], Moments]]) -> RunFigure:
    """For each title, the units as rows and the moments of a step as columns: dark
    where a rank has the unit's parameters in full."""
    rows = [len(units) for units, _ in runs.values()]
    height = sum(0.27 * count + 1.05 for count in rows)
    figure = RunFigure(figsize=(8.2, height))
    top = height
    for (title, (units, moments)), count in zip(runs.items(), rows, strict=True):
        tall = 0.27 * count
        axes = figure.add_axes((0.2, (top - 0.35 - tall) / height, 0.78, tall / height))
        table = np.array([held for _, held in moments]).T
        sizes = table.max(axis=1)
        shares = table / np.maximum(sizes, 1)[:, None]
        axes.imshow(shares, cmap="Blues", aspect="auto", vmin=0, vmax=1.2)
        style_axes(axes, "", "")
        axes.grid(visible=False)
        labels = [
            f"{unit}, {size / MIB:.2f} MiB"
            for unit, size in zip(units, sizes, strict=True)
        ]
        axes.set_yticks(range(len(units)), labels)
        axes.set_yticks(np.arange(0.5, len(units) - 1), minor=True)
        axes.grid(visible=True, which="minor", axis="y", color="#e5e5e5", lw=0.8)
        axes.tick_params(which="minor", length=0)
        names = [name for name, _ in moments]
        words, numbers = zip(*map(str.split, names), strict=True)
        axes.set_xticks(range(len(names)), numbers)
        for word in dict.fromkeys(words):
            places = [place for place, each in enumerate(words) if each == word]
            axes.text(
                sum(places) / len(places),
                -0.42 / tall,
                word,
                transform=axes.get_xaxis_transform(),
                ha="center",
                fontsize=SMALL,
                color=INK,
            )
        use_title(axes, title)
        top -= 1.05 + tall
    return figure
