"""Draws what ranks hold as numbered cells, before and after they communicate."""

from collections.abc import Mapping
from collections.abc import Sequence
from itertools import chain
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS

CELL_INCHES = 0.41
ROW_INCHES = 0.31
RING_INCHES = 0.25
GAP = 2.2
"""Cells between what was and what is, where the arrow is."""
MOST_RANKS = 10
"""With more, 2**ranks sums are too many to look for."""


def draw_exchange(before: Sequence[Any], after: Sequence[Any]) -> RunFigure:
    """What each rank held before a call, and what after; see `draw_exchanges`."""
    return draw_exchanges([{"": both} for both in zip(before, after, strict=True)])


def draw_exchanges(by_rank: Sequence[Mapping[str, tuple[Any, Any]]]) -> RunFigure:
    """For each title, what each rank held before, an arrow, and what it holds after.

    A cell has the colours of the ranks whose numbers are in it: those whose numbers
    before add up to it. One that is no such sum is white.

    Parameters
    ----------
    by_rank : list of dict
        Of each rank: by title, what it held before and after. That is a tensor, a list
        of tensors, or None for nothing.
    """
    numbers = {
        title: (
            [numbers_of(held[title][0]) for held in by_rank],
            [numbers_of(held[title][1]) for held in by_rank],
        )
        for title in by_rank[0]
    }
    width = max(
        max(map(len, before)) + GAP + max(map(len, after))
        for before, after in numbers.values()
    )
    num_ranks = len(by_rank)
    num_columns = min(len(numbers), 2 if width <= 14 else 1)
    num_rows = -(-len(numbers) // num_columns)
    head = 1.7 if any(numbers) else 0.9  # room for titles
    inches = (
        num_columns * (width + 2.6) * CELL_INCHES,
        num_rows * (num_ranks + 0.2 + head) * ROW_INCHES,
    )
    figure = RunFigure(figsize=inches)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1, wspace=0, hspace=0)
    for place, (title, (before, after)) in enumerate(numbers.items(), start=1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        axes.set_axis_off()
        axes.set(xlim=(-2.2, width + 0.4), ylim=(num_ranks + 0.2, -head))
        axes.text(0, -1.15, title, fontsize=10, weight="bold", color=INK, va="center")
        start = max(map(len, before)) + GAP
        draw_rows(axes, before, before, left=0)
        draw_rows(axes, after, before, left=start)
        for left, word in ((0, "before"), (start, "after")):
            axes.text(left, -0.35, word, fontsize=8, color="#777777", va="center")
        _draw_arrow(axes, start - GAP + 0.4, start - 0.4, num_ranks / 2)
        _name_ranks(axes, num_ranks)
    return figure


def draw_ring(num_ranks: int) -> RunFigure:
    """An all-reduce in a ring, turn by turn: whose numbers are in each part, where.

    What has just arrived has a thick frame.
    """
    turns = ring_turns(num_ranks)
    width = len(turns) * (num_ranks + 0.8)
    inches = (width + 2.8) * RING_INCHES, (num_ranks + 1.5) * RING_INCHES
    figure = RunFigure(figsize=inches)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(-2.6, width + 0.2), ylim=(num_ranks + 0.2, -1.3))
    for turn, held in enumerate(turns):
        left = turn * (num_ranks + 0.8)
        title = f"turn {turn}" if turn else "before"
        axes.text(left, -0.6, title, fontsize=9, color=INK)
        for (rank, part), whose in held.items():
            _draw_cell(axes, left + part, rank, "", whose)
        for rank in range(num_ranks if turn else 0):
            at = left + (rank - turn) % num_ranks, rank
            axes.add_patch(Rectangle(at, 1, 1, fc="none", ec=INK, lw=1.8))
    _name_ranks(axes, num_ranks)
    return figure


def draw_compressions() -> RunFigure:
    """One gradient, 6 x 10, as it is sent in four ways: what arrives of it, and below
    how many bytes that takes."""
    generator = np.random.default_rng(4)
    rows, columns = generator.normal(size=(6, 1)), generator.normal(size=(1, 10))
    whole = rows @ columns + 0.45 * generator.normal(size=(6, 10))
    left = np.linalg.svd(whole)[0][:, :1]
    least = np.sort(np.abs(whole), axis=None)[-6]
    ways = {
        "whole": (whole, "60 numbers: 240 bytes"),
        "rounded (bf16)": (np.round(whole * 2) / 2, "60 of half the size: 120"),
        "factors (PowerSGD)": (left @ left.T @ whole, "6 + 10 numbers: 64"),
        "largest (top-k)": (
            np.where(np.abs(whole) >= least, whole, 0.0),
            "6 numbers and places: 48",
        ),
    }
    figure = RunFigure(figsize=(9.6, 2.0))
    panels = figure.subplots(1, len(ways))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.14, top=0.86, wspace=0.1)
    limit = float(np.abs(whole).max())
    for axes, (title, (arrives, caption)) in zip(panels, ways.items(), strict=True):
        axes.imshow(arrives, cmap="PuOr", vmin=-limit, vmax=limit)
        axes.set_xticks(np.arange(-0.5, 10), labels=[])
        axes.set_yticks(np.arange(-0.5, 6), labels=[])
        axes.grid(color="white", lw=1.0)
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set_xlabel(caption, fontsize=9, color=INK)
        axes.spines[:].set_visible(False)
    return figure


def ring_turns(num_ranks: int) -> list[dict[tuple[int, int], tuple[int, ...]]]:
    """Whose numbers are in the part of a rank, by (rank, part), before a ring's first
    turn and after each.

    In turn t rank r gets part r - t from the rank before it, which adds up that part,
    or, from turn `num_ranks` on, has it complete.
    """
    places = list(np.ndindex(num_ranks, num_ranks))
    turns: list[dict[tuple[int, int], tuple[int, ...]]] = [
        {(rank, part): (rank,) for rank, part in places}
    ]
    for turn in range(1, 2 * num_ranks - 1):
        held = dict(turns[-1])
        for rank in range(num_ranks):
            part = (rank - turn) % num_ranks
            sent = turns[-1][(rank - 1) % num_ranks, part]
            held[rank, part] = tuple(sorted({*held[rank, part], *sent}))
        turns.append(held)
    return turns


def numbers_of(held: Any) -> np.ndarray:
    """What a rank holds, as one row: a tensor, a list of tensors, or None."""
    if held is None:
        return np.empty(0)
    parts = held if isinstance(held, list | tuple) else [held]
    return np.concatenate([np.asarray(part, dtype=float).ravel() for part in parts])


def draw_rows(
    axes: Axes,
    rows: Sequence[np.ndarray],
    sources: Sequence[np.ndarray],
    *,
    left: float,
) -> None:
    """One row of cells for each rank, in the colours of those whose numbers they hold.

    `sources` are the numbers by rank of which cells may be sums.
    """
    for rank, row in enumerate(rows):
        for place, number in enumerate(row):
            whose = who_is_in(number, sources)
            _draw_cell(axes, left + place, rank, f"{number:g}", whose)
        if not len(row):
            axes.text(left, rank + 0.5, "nothing", **_SMALL, style="italic")


def who_is_in(number: float, sources: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The ranks whose numbers, at one place, add up to `number`; () where none do."""
    ranks = range(len(sources))
    most = len(sources) if len(sources) <= MOST_RANKS else 1
    choices = chain(*(combinations(ranks, n) for n in range(1, most + 1)))
    for chosen in [*choices, tuple(ranks)]:
        places = min(len(sources[rank]) for rank in chosen)
        sums = sum(sources[rank][:places] for rank in chosen)
        if np.isclose(sums, number).any():
            return chosen
    return ()


_SMALL: dict[str, Any] = {"fontsize": 8, "color": "#777777", "va": "center"}


def _draw_cell(
    axes: Axes, x: float, y: float, text: str, ranks: tuple[int, ...]
) -> None:
    for turn, rank in enumerate(ranks):
        colour = np.array(to_rgb(RANK_COLOURS[rank % len(RANK_COLOURS)]))
        stripe = 1 / len(ranks)
        axes.add_patch(
            Rectangle(
                (x + turn * stripe, y), stripe, 1, fc=0.45 * colour + 0.55, ec="none"
            )
        )
    axes.add_patch(Rectangle((x, y), 1, 1, fc="none", ec="white", lw=2))
    axes.add_patch(Rectangle((x, y), 1, 1, fc="none", ec="#999999", lw=0.5))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9, color=INK)


def _draw_arrow(axes: Axes, start: float, end: float, y: float) -> None:
    axes.annotate(
        "",
        (end, y),
        (start, y),
        arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.4},
    )


def _name_ranks(axes: Axes, num_ranks: int) -> None:
    for rank in range(num_ranks):
        axes.text(
            -0.2,
            rank + 0.5,
            f"rank {rank}",
            ha="right",
            va="center",
            fontsize=9,
            weight="bold",
            color=RANK_COLOURS[rank % len(RANK_COLOURS)],
        )
