"""What labkit's figures share: colours, units, and the look of axes."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which the colour-blind distinguish too, without yellow,
# which is hard to see on white, and black, which is for means. Violet and brown are as
# far from the others for any eye.
RANK_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#6600CC",
    "#663300",
)
# Curves that lie on each other are seen to be several.
LINE_STYLES: tuple[Any, ...] = (
    "-",
    (0, (4, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (4, 5)),
    (0, (1.5, 4)),
    (0, (9, 3)),
    (0, (6, 2, 1.5, 2, 1.5, 2)),
)
# In points, for figures that are read at half their size on a slide.
LARGE, MEDIUM, SMALL = 11, 10, 9
INK = "#333333"
WARNING_INK = "#B03A00"


def style_of(place: int) -> dict[str, Any]:
    """Colour and line style of the rank, or run, at `place` of a picture's."""
    turn = place // len(RANK_COLOURS)  # the colours begin again with other styles
    return {
        "color": RANK_COLOURS[place % len(RANK_COLOURS)],
        "ls": LINE_STYLES[(place + turn) % len(LINE_STYLES)],
    }


def ink_on(colour: Any) -> str:
    """White or ink, whichever is read better on a colour."""

    def luminance(each: Any) -> float:
        rgb = np.array(to_rgb(each))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    # Contrast as WCAG 2 has it.
    paper = luminance(colour) + 0.05
    return "white" if 1.05 / paper > paper / (luminance(INK) + 0.05) else INK


def style_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """The look that all of labkit's axes share."""
    axes.set_xlabel(x_label, fontsize=MEDIUM, color=INK)
    axes.set_ylabel(y_label, fontsize=MEDIUM, color=INK)
    axes.tick_params(labelsize=SMALL, colors=INK)
    axes.grid(True, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def use_title(axes: Axes, text: str, *, size: float = MEDIUM, pad: float = 6.0) -> None:
    """Say above the axes what they show. It may have any letters, and is no formula."""
    axes.set_title(
        text, loc="left", fontsize=size, color=INK, pad=pad, parse_math=False
    )
