"""Draws boxes and arrows: who talks to whom, and who holds what."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle
from matplotlib.patches import FancyBboxPatch
from matplotlib.patches import Rectangle

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.memory_bars import PART_COLOURS
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import ink_on

GREY = "#777777"
DIVIDED = {"pp": 0, "dp_shard": 1, "tp": 2}
"""What axes of a mesh divide of (layers, rows, columns)."""
STAGES = (
    # name, DeepSpeed's word, which of parameters, gradients and optimizer are whole
    ("baseline", "ddp", (True, True, True)),
    (r"$P_{os}$", "zero1", (True, True, False)),
    (r"$P_{os+g}$", "zero2", (True, False, False)),
    (r"$P_{os+g+p}$", "zero3", (False, False, False)),
)


def draw_cluster(num_ranks: int) -> RunFigure:
    """The notebook's kernel, the engines beside it, their ranks, and their group."""
    bottom, top = 0.3, 0.75 * num_ranks + 0.3
    middle = (bottom + top) / 2
    axes = _canvas(8.4, top + 0.75)
    _write(axes, 0.2, top + 0.45, "this notebook", weight="bold")
    _write(axes, 4.2, top + 0.45, "engines: one process each", weight="bold")
    _write(axes, 6.85, top + 0.45, "process group", weight="bold")
    draw_box(axes, 0.2, middle - 0.42, 1.8, 0.84, "kernel\nyour variables", INK)
    for rank in range(num_ranks):
        y = top - 0.75 * (rank + 1) + 0.1
        colour = colour_of(rank)
        draw_box(
            axes, 4.2, y, 2.1, 0.55, f"rank {rank}\nits variables and device", colour
        )
        at = y + 0.275
        near = middle + 0.8 * (at - middle) / num_ranks
        draw_arrow(axes, (2.05, near), (4.15, at), colour, style="<|-|>")
        draw_arrow(axes, (6.35, at), (6.95, at), colour, style="<|-|>")
    draw_box(
        axes,
        7.0,
        bottom + 0.1,
        1.1,
        top - bottom - 0.2,
        "tensors\nbetween\nranks",
        GREY,
    )
    _write(axes, 2.1, top, "cells, variables →", size=9)
    _write(axes, 2.1, bottom, "← output, tensors", size=9)
    return _figure_of(axes)


def draw_patterns(num_ranks: int) -> RunFigure:
    """Which ranks send to which: from one, to one, among all, and between two."""
    axes = _canvas(10.4, 2.9)
    senders = range(num_ranks)
    around = [(rank, (rank + 1) % num_ranks) for rank in senders]
    patterns = {
        "from one to all": ("broadcast, scatter", [(0, to) for to in senders]),
        "from all to one": ("reduce, gather", [(rank, 0) for rank in senders]),
        "among all": (
            "all_reduce, all_gather,\nreduce_scatter, all_to_all",
            [(rank, to) for rank in senders for to in senders],
        ),
        "from one to the next": ("send, recv", around),
    }
    for place, (title, (calls, arrows)) in enumerate(patterns.items()):
        x = 1.3 + 2.6 * place
        _write(axes, x, 2.65, title, weight="bold", ha="center")
        _write(axes, x, 0.26, calls, size=9, ha="center")
        places = _around(x, 1.5, 0.68, num_ranks)
        for rank, to in arrows:
            if rank != to:
                _link(axes, places[rank], places[to], colour_of(rank))
        for rank, centre in enumerate(places):
            _draw_rank(axes, centre, rank)
    return _figure_of(axes)


def draw_data_parallel_step(num_ranks: int) -> RunFigure:
    """A step of data parallelism: a part of the batch, a gradient, their mean."""
    top = 0.8 * num_ranks + 0.2
    axes = _canvas(10.4, top + 0.45)
    titles = {0.2: "its part of a batch", 2.5: "its gradient", 8.0: "same weights"}
    for x, title in titles.items():
        _write(axes, x, top + 0.2, title, weight="bold")
    draw_box(axes, 5.2, 0.2, 1.7, top - 0.35, "all_reduce,\nthen divide\nby $N$", GREY)
    for rank in range(num_ranks):
        colour = colour_of(rank)
        y = top - 0.8 * (rank + 1) + 0.05
        at = y + 0.3
        draw_box(axes, 0.2, y, 1.5, 0.6, f"rank {rank}\n$B/N$ samples", colour)
        draw_box(axes, 2.5, y, 1.9, 0.6, f"forward, backward\n$g_{{{rank}}}$", colour)
        draw_box(axes, 8.0, y, 2.1, 0.6, "optimizer step\n$w - \\eta\\, g$", colour)
        for start, end in ((1.75, 2.45), (4.45, 5.15), (6.95, 7.95)):
            draw_arrow(axes, (start, at), (end, at), colour)
        _write(axes, 7.45, at + 0.16, "$g$", ha="center")
    return _figure_of(axes)


def draw_server(num_workers: int) -> RunFigure:
    """Workers that push gradients to a server and pull parameters, beside the ring of
    an all-reduce."""
    axes = _canvas(10.4, 3.1)
    width = 1.45
    left = [0.2 + (width + 0.25) * worker for worker in range(num_workers)]
    middle = (left[0] + left[-1] + width) / 2
    server = colour_of(num_workers)
    _write(axes, 0.2, 2.9, "a server and its workers", weight="bold")
    text = "the last rank, a server: parameters $w$,\noptimizer, its state"
    draw_box(axes, middle - 1.55, 1.95, 3.1, 0.65, text, server)
    for worker, x in enumerate(left):
        colour, at = colour_of(worker), x + width / 2
        text = f"rank {worker}\nforward, backward"
        draw_box(axes, x, 0.15, width, 0.65, text, colour)
        to = middle + 0.55 * (at - middle)
        draw_arrow(axes, (at - 0.1, 0.82), (to - 0.1, 1.92), colour)
        draw_arrow(axes, (to + 0.12, 1.92), (at + 0.12, 0.82), server)
        _write(axes, (at + to) / 2 - 0.36, 1.3, f"$g_{{{worker}}}$", size=9)
        _write(axes, (at + to) / 2 + 0.22, 1.3, "$w$", size=9)
    _write(axes, 6.6, 2.9, "an all-reduce: all ranks alike", weight="bold")
    places = _around(8.1, 1.35, 0.95, num_workers + 1)
    for rank, centre in enumerate(places):
        after = places[(rank + 1) % len(places)]
        _link(axes, centre, after, colour_of(rank))
        _draw_rank(axes, centre, rank)
    return _figure_of(axes)


def draw_two_hosts(ranks_per_host: int) -> RunFigure:
    """What crosses the link between two hosts in an all-reduce: as one ring over all
    ranks, and by host. A thick arrow crosses it, and carries so many tensors."""
    num_ranks = 2 * ranks_per_host
    top = 0.75 * ranks_per_host + 0.75
    axes = _canvas(8.6, top + 0.4)

    def ranks_of(left: float, is_ring: bool) -> list[tuple[float, float]]:
        first, *_ = columns = left + 0.5, left + 3.1
        places = []
        for rank in range(num_ranks):
            row = rank % ranks_per_host
            x = columns[rank // ranks_per_host]
            if is_ring and x > first:  # down on the left, up on the right
                row = ranks_per_host - 1 - row
            places.append((x, top - 0.55 - 0.75 * row))
        for host, x in enumerate(columns):
            height = 0.75 * ranks_per_host + 0.3
            draw_box(axes, x - 0.4, top - height - 0.05, 0.8, height, "", GREY)
            _write(axes, x, 0.22, f"host {host}", size=9, ha="center")
        for rank, at in enumerate(places):
            _draw_rank(axes, at, rank)
        return places

    def cross(start: tuple[float, float], end: tuple[float, float], both: bool) -> None:
        x = 0.24 if end[0] > start[0] else -0.24
        style = "<|-|>" if both else "-|>"
        draw_arrow(
            *(axes, (start[0] + x, start[1]), (end[0] - x, end[1]), INK),
            style=style,
            width=2.5,
        )
        middle = (start[0] + end[0]) / 2, start[1] + 0.16
        amount = 1 / ranks_per_host if both else 2 * (num_ranks - 1) / num_ranks
        _write(axes, *middle, f"{amount:.3g}", size=9, ha="center")

    _write(axes, 0.1, top + 0.2, "one ring over all ranks", weight="bold")
    places = ranks_of(0.0, is_ring=True)
    for rank, start in enumerate(places):
        end = places[(rank + 1) % num_ranks]
        if (rank + 1) % ranks_per_host:
            _link(axes, start, end, colour_of(rank))
        else:
            cross(start, end, both=False)
    _write(axes, 4.7, top + 0.2, "by host: within, between, within", weight="bold")
    places = ranks_of(4.6, is_ring=False)
    for rank, start in enumerate(places):
        if (rank + 1) % ranks_per_host:
            (x, y), (_, below) = start, places[rank + 1]
            draw_arrow(axes, (x, y - 0.24), (x, below + 0.24), GREY, style="<|-|>")
        if rank < ranks_per_host:
            cross(start, places[rank + ranks_per_host], both=True)
    return _figure_of(axes)


def draw_meshes(meshes: Mapping[str, Mapping[str, int]]) -> RunFigure:
    """What each rank holds of two layers, and which samples it sees, by mesh.

    Parameters
    ----------
    meshes : mapping of str to mapping of str to int
        The sizes of a mesh's axes, outermost first, under a title.
    """
    num_ranks = max(prod(sizes.values()) for sizes in meshes.values())
    panel, height, cell = 2.7, 0.66, 0.115
    top = height * num_ranks + 0.15
    axes = _canvas(panel * len(meshes), top + 0.4)
    for place, (title, sizes) in enumerate(meshes.items()):
        left = panel * place
        _write(axes, left + 0.2, top + 0.2, title, size=9, weight="bold")
        for rank in range(prod(sizes.values())):
            held, part, num_parts = held_by(sizes, rank)
            y = top - height * (rank + 1) + 0.12
            _write(axes, left + 0.2, y + 2 * cell, f"{rank}", color=colour_of(rank))
            for layer, row, column in np.ndindex(held.shape):
                x = left + 0.45 + cell * (5 * layer + column)
                at = x, y + cell * (3 - row)  # the first row is at the top
                colour = colour_of(rank) if held[layer, row, column] else "#E8E8E8"
                axes.add_patch(Rectangle(at, cell, cell, fc=colour, ec="white", lw=0.6))
            told = f"samples {part + 1}/{num_parts}" if num_parts > 1 else "all samples"
            _write(axes, left + 0.6 + 9 * cell, y + 2 * cell, told, size=9)
    return _figure_of(axes)


def held_by(sizes: Mapping[str, int], rank: int) -> tuple[np.ndarray, int, int]:
    """Which of (2 layers, 4 rows, 4 columns) a rank of this mesh holds, which part of a
    batch it sees, and of how many.

    `pp` divides layers, `dp_shard` rows, `tp` columns; `dp` and `dp_replicate` samples
    alone.
    """
    places = np.unravel_index(rank, tuple(sizes.values()))
    held, part, num_parts = np.ones((2, 4, 4), dtype=bool), 0, 1
    for (name, size), place in zip(sizes.items(), places, strict=True):
        if name.startswith("dp"):
            part, num_parts = part * size + int(place), num_parts * size
        if name in DIVIDED:
            along = np.moveaxis(held, DIVIDED[name], 0)  # a view
            own = np.arange(len(along)) * size // len(along) == place
            along[~own] = False
    return held, part, num_parts


def draw_zero_stages(
    num_parameters: float, num_gpus: int, *, optimizer_bytes: int = 12
) -> RunFigure:
    """Draw what three of the GPUs hold under each stage of ZeRO, to scale.

    Parameters
    ----------
    num_parameters : float
        Of the model; each has 2 bytes, and its gradient 2.
    num_gpus : int
        Among which the stages divide.
    optimizer_bytes : int, default 12
        Bytes of optimizer state of a parameter: Adam's two numbers, and an fp32 copy.

    Source: Rajbhandari et al., "ZeRO", SC 2020, Figure 1.
    """
    parts = {"parameters": 2, "gradients": 2, "optimizer_state": optimizer_bytes}
    labels = ("parameters", "gradients", "optimizer state, fp32 copy")
    of_all = sum(parts.values())
    figure = RunFigure(figsize=(8.4, 3.2))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-0.75, 4.3), ylim=(-0.75, 4.65))
    axes.axis("off")
    for column, gpu in enumerate(("GPU 0", "GPU i", f"GPU {num_gpus - 1}")):
        axes.text(1.06 * column + 0.5, 4.2, gpu, ha="center", fontsize=10)
    for row, (name, strategy, whole) in enumerate(STAGES):
        bottom = 3.2 - row
        held = [
            size * (1 if is_whole else 1 / num_gpus)
            for size, is_whole in zip(parts.values(), whole, strict=True)
        ]
        axes.text(-0.06, bottom + 0.46, name, ha="right", fontsize=11)
        axes.text(-0.06, bottom + 0.12, strategy, ha="right", fontsize=9, color="grey")
        for column in range(3):
            left = 1.06 * column
            axes.add_patch(
                Rectangle((left, bottom), 1, 0.8, fc="#f5f5f5", ec="#cccccc", lw=0.8)
            )
            for part, size, mine in zip(parts, parts.values(), held, strict=True):
                # A rank's part lies where it is in the whole: first, between, or last.
                place = left + (size - mine) / of_all * column / 2
                axes.add_patch(
                    Rectangle(
                        (place, bottom),
                        max(mine / of_all, 0.006),
                        0.8,
                        fc=PART_COLOURS[part],
                    )
                )
                left += size / of_all
        total = num_parameters * sum(held) / 1e9
        axes.text(3.25, bottom + 0.3, f"{total:.3g} GB", fontsize=13, weight="bold")
    handles = [Rectangle((0, 0), 1, 1, fc=PART_COLOURS[part]) for part in parts]
    axes.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def colour_of(rank: int) -> str:
    """The colour that a rank has in every picture."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def draw_box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str
) -> None:
    """A box with rounded corners, its lower left at (x, y), with text in it."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.08",
            fc="white",
            ec=colour,
            lw=1.8,
        )
    )
    _write(axes, x + width / 2, y + height / 2, text, size=9, ha="center")


def draw_arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    *,
    style: str = "-|>",
    bend: float = 0.0,
    width: float = 1.5,
) -> None:
    """An arrow from `start` to `end`; `bend` curves it."""
    axes.annotate(
        "",
        end,
        start,
        arrowprops={
            "arrowstyle": style,
            "color": colour,
            "lw": width,
            "shrinkA": 0,
            "shrinkB": 0,
            "connectionstyle": f"arc3,rad={bend}",
        },
    )


def _canvas(width: float, height: float) -> Axes:
    """Axes without a frame whose units are inches."""
    figure = RunFigure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(0, height))
    return axes


def _figure_of(axes: Axes) -> RunFigure:
    figure = axes.figure
    assert isinstance(figure, RunFigure)
    return figure


def _draw_rank(axes: Axes, centre: tuple[float, float], rank: int) -> None:
    """A disk in the rank's colour, with its number."""
    colour = colour_of(rank)
    axes.add_patch(Circle(centre, 0.19, fc=colour, ec="none", zorder=3))
    middle: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}
    axes.text(*centre, str(rank), color=ink_on(colour), **middle)


def _write(
    axes: Axes, x: float, y: float, text: str, *, size: float = 10, **more: Any
) -> None:
    axes.text(x, y, text, **{"fontsize": size, "color": INK, "va": "center", **more})


def _around(x: float, y: float, radius: float, count: int) -> list[tuple[float, float]]:
    """Places on a circle, the first at the top, clockwise."""
    angles = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    return [(x + radius * np.cos(a), y + radius * np.sin(a)) for a in angles]


def _link(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str
) -> None:
    """A bent arrow that ends at the rims of two ranks' circles."""
    (x, y), (to_x, to_y) = start, end
    length = float(np.hypot(to_x - x, to_y - y))
    dx, dy = 0.24 * (to_x - x) / length, 0.24 * (to_y - y) / length
    draw_arrow(axes, (x + dx, y + dy), (to_x - dx, to_y - dy), colour, bend=0.18)
