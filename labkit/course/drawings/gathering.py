"""Draws which units of a sharded model are whole, and when."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import PowerNorm

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.style import INK

Moments = Sequence[tuple[str, Sequence[float]]]
"""What happens at a moment, and the bytes that each unit holds in full, root first."""


def ideal_moments(num_blocks: int) -> Moments:
    """By FSDP's rule: the block at work is whole, and the root all along."""

    def held(block: int) -> list[float]:
        return [1.0, *(float(block == each) for each in range(num_blocks))]

    blocks = range(num_blocks)
    forward = [(f"forward {block}", held(block)) for block in blocks]
    backward = [(f"backward {block}", held(block)) for block in reversed(blocks)]
    none = [0.0] * (num_blocks + 1)
    return [("before", none), *forward, *backward, ("after", none)]


def draw_gathered(moments: Moments, *more: Moments, unit: str = "KiB") -> RunFigure:
    """A row for each unit, a column for each moment; dark is whole.

    More of them are drawn below, on the same scale of colours.
    """
    tables = [
        np.array([held for _, held in each]).T / 2**10 for each in (moments, *more)
    ]
    height = 0.9 + 0.24 * max(map(len, tables))
    figure = RunFigure(figsize=(8.0, height * len(tables)), dpi=100, facecolor="white")
    figure.set_layout_engine("constrained")
    greatest = max(table.max() for table in tables)
    norm = PowerNorm(0.35, vmin=0, vmax=greatest)  # the root, which is small, is seen
    panels = figure.subplots(len(tables), 1, squeeze=False, sharex=True)[:, 0]
    for axes, table in zip(panels, tables, strict=True):
        image = axes.imshow(
            table, cmap="Blues", aspect="auto", norm=norm, origin="upper"
        )
        names = ["root", *(f"block {place}" for place in range(len(table) - 1))]
        axes.set_yticks(range(len(table)), names, fontsize=8, color=INK)
        axes.set_yticks(np.arange(len(table) - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="#dddddd", lw=0.6)
        axes.tick_params(which="minor", length=0)
    words = [what for what, _ in moments]
    panels[-1].set_xticks(
        range(len(words)), words, rotation=50, ha="right", fontsize=8, color=INK
    )
    if unit:
        bar = figure.colorbar(image, ax=panels, pad=0.01)
        bar.set_label(f"held in full ({unit})", fontsize=9, color=INK)
    return figure
