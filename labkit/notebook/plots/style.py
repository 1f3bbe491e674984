"""What labkit's figures share: colours of ranks, the look of axes, and lettering."""

from functools import cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.font_manager import findfont
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from PIL import Image
from PIL import ImageDraw
from PIL import ImageFont

# Okabe and Ito's colours, told apart by the colour-blind too, but for yellow, which
# is not seen on white, and black, which is for means: violet and brown are as far from
# the others for any eye.
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
INK = "#333333"
WARNING_INK = "#B03A00"


def style_of(place: int) -> dict[str, Any]:
    """Colour and line style of the rank, or run, at `place` of a picture's."""
    turn = place // len(RANK_COLOURS)  # the colours begin again with other styles
    return {
        "color": RANK_COLOURS[place % len(RANK_COLOURS)],
        "ls": LINE_STYLES[(place + turn) % len(LINE_STYLES)],
    }


def dress(axes: Axes, x_label: str, y_label: str) -> None:
    """The look that all of labkit's axes share."""
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(True, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def write(pixels: np.ndarray, text: Text) -> None:
    """Draw a text of a figure over white pixels, (height, width, 4), in place.

    Its place is where it begins, on the baseline. Matplotlib draws a text letter by
    letter, which took more than all curves of a picture.
    """
    if not text.get_text():
        return
    figure = text.get_figure()
    assert figure is not None
    x, y = text.get_transform().transform(text.get_position())
    font = find_font(round(float(text.get_fontsize()) * figure.dpi / 72))
    _, top, right, bottom = font.getbbox(text.get_text(), anchor="ls")
    image = Image.new("L", (int(right), int(bottom - top)))
    ImageDraw.Draw(image).text((0, -top), text.get_text(), 255, font, anchor="ls")
    begin = round(len(pixels) - y + top)
    place = pixels[begin : begin + image.height, round(x) : round(x) + image.width, :3]
    ink = np.array(to_rgb(text.get_color())) * 255
    alpha = np.asarray(image)[: len(place), : place.shape[1], None] / 255
    place[:] = place * (1 - alpha) + ink * alpha


@cache
def find_font(num_pixels: int) -> ImageFont.FreeTypeFont:
    """The font of matplotlib's texts, which it comes with."""
    return ImageFont.truetype(findfont("DejaVu Sans"), num_pixels)
