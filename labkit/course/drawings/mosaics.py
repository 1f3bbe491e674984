"""Draws which rank has seen which sample."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.patches import Rectangle

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS

TWICE, NEVER = "black", "white"
NUM_COLUMNS = 48
"""Samples in a row of a mosaic."""

Deal = Sequence[Sequence[int]]
"""By rank, the numbers of the samples that it sees, in order."""


def draw_deal(deal: Deal, batch_size: int) -> RunFigure:
    """The samples of each rank in the order in which it sees them, step by step.

    `batch_size` is that of one rank. A sample that was seen before, by any rank, has a
    black frame.
    """
    longest = max(map(len, deal))
    figure = RunFigure(figsize=(1.0 + 0.42 * longest, 0.75 + 0.42 * len(deal)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(-2.2, longest + 0.2), ylim=(len(deal) + 0.15, -1.1))
    seen: set[int] = set()
    again = []
    for place in range(longest):
        for rank, samples in enumerate(deal):
            if place < len(samples):
                _draw_sample(axes, place, rank, samples[place])
                if samples[place] in seen:
                    again.append((place, rank))
                seen.add(samples[place])
    for place, rank in again:
        axes.add_patch(Rectangle((place, rank), 1, 1, fc="none", ec="black", lw=2.2))
    for step in range(-(-longest // batch_size)):
        left = step * batch_size
        right = min(left + batch_size, longest)
        axes.plot([left + 0.1, right - 0.1], [-0.2, -0.2], color=INK, lw=1)
        axes.text((left + right) / 2, -0.55, f"step {step + 1}", **_CENTRED)
    for rank in range(len(deal)):
        axes.text(-0.2, rank + 0.5, f"rank {rank}", **{**_CENTRED, "ha": "right"})
    return figure


_CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "color": INK}


def _draw_sample(axes: Axes, x: float, y: float, sample: int) -> None:
    colour = np.array(to_rgb(RANK_COLOURS[int(y) % len(RANK_COLOURS)]))
    axes.add_patch(Rectangle((x, y), 1, 1, fc=0.45 * colour + 0.55, ec="white", lw=1.5))
    axes.text(x + 0.5, y + 0.5, str(sample), **_CENTRED)


def draw_mosaic(deals: Mapping[str, Deal], num_samples: int) -> RunFigure:
    """For each title a square for every sample, in the colour of the rank that saw it.

    Black are samples that were seen more than once, white those that no rank has seen.
    """
    num_rows = -(-num_samples // NUM_COLUMNS)
    width = 10.4 / max(2, len(deals))
    height = 0.95 * width * num_rows / NUM_COLUMNS
    num_ranks = max(map(len, deals.values()))
    figure = RunFigure(figsize=(width * len(deals), height + 0.75))
    figure.subplots_adjust(
        left=0.01,
        right=0.99,
        top=1 - 0.3 / (height + 0.75),
        bottom=0.4 / (height + 0.75),
    )
    panels = figure.subplots(1, len(deals), squeeze=False)[0]
    for axes, (title, deal) in zip(panels, deals.items(), strict=True):
        colours = np.ones((num_rows * NUM_COLUMNS, 3))
        counts = Counter(sample for samples in deal for sample in samples)
        for rank, samples in enumerate(deal):
            colours[list(samples)] = to_rgb(RANK_COLOURS[rank % len(RANK_COLOURS)])
        colours[num_samples:] = 0.9  # the rest of the last row
        colours[[sample for sample, count in counts.items() if count > 1]] = 0.0
        axes.imshow(colours.reshape(num_rows, NUM_COLUMNS, 3), interpolation="nearest")
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set_axis_off()
    patches = [
        Patch(color=RANK_COLOURS[rank % len(RANK_COLOURS)], label=f"rank {rank}")
        for rank in range(num_ranks)
    ]
    patches.append(Patch(color=TWICE, label="seen twice"))
    patches.append(Patch(fc=NEVER, ec="#999999", label="never seen"))
    figure.legend(
        handles=patches,
        loc="lower left",
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        bbox_to_anchor=(0.0, 0.0),
    )
    return figure
