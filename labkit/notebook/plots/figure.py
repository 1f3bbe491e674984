"""Figures that any notebook shows as a small PNG, without pyplot."""

import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from PIL import Image

from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import WARNING_INK
from labkit.records import shorten

MAX_ALT = 500
"""Characters: a screen reader reads all of them."""
ALWAYS = ("white", INK, WARNING_INK, *RANK_COLOURS)
"""Colours of every palette: a live picture keeps its own while lines and remarks that
were not there before are drawn."""
NUM_COMMON = 24
"""How many of a picture's most frequent colours are kept as they are: its areas."""


class RunFigure(Figure):
    """A figure that any notebook shows as a PNG, without pyplot."""

    def __init__(self, *, dpi: float = 100, **options: Any) -> None:
        super().__init__(dpi=dpi, facecolor="white", **options)

    def show(self, warn: bool = True) -> None:
        """Display it, in a loop, say, where it is not the last line of a cell."""
        from IPython.display import display

        display(self)

    def _repr_png_(self) -> bytes:
        return to_png(self)

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], ...]:
        """As a PNG, with words for those who do not see it: nbconvert's template
        `classic` has them, and the site. JupyterLab does not read them yet."""
        alt = {"alt": words_of(self)}
        return {"image/png": to_png(self)}, {"image/png": alt}


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG, drawn from scratch."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    return Palette(pixels).encode(pixels)


def words_of(figure: Figure) -> str:
    """What a figure shows, by its titles, axes, words and legends."""
    parts = [text.get_text() for text in figure.texts]
    legends = [*figure.legends]
    for axes in figure.axes:
        title = axes.get_title(loc="left") or axes.get_title()
        x, y = axes.get_xlabel(), axes.get_ylabel()
        of = f"{y} by {x}" if x and y else x or y
        parts.append(": ".join(each for each in (title, of) if each))
        if not axes.axison:  # a drawing, which has only words
            parts += [text.get_text() for text in axes.texts]
            continue
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        # Not of powers of ten on a logarithmic axis, which are written as math.
        names = [re.sub(r"\$.*?\$", "", tick.get_text()) for tick in ticks]
        parts.append(", ".join(each for each in names if re.search("[a-z]{2}", each)))
        if (legend := axes.get_legend()) is not None:
            legends.append(legend)
    parts += [", ".join(names) for names in map(_names, legends)]
    return shorten("; ".join(" ".join(each.split()) for each in parts if each), MAX_ALT)


def _names(legend: Legend) -> Iterator[str]:
    return (text.get_text() for text in legend.get_texts())


class Palette:
    """Some 100 colours that suit a picture; encodes it and others like it.

    To find them costs more than all the rest of encoding. A PNG with a palette has
    half the size of a full one.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        """`pixels`: (height, width, 4), 8 bits a channel."""
        # Of areas every fourth pixel tells as much as all.
        some = np.ascontiguousarray(pixels[::2, ::2]).view("<u4")
        values, counts = np.unique(some, return_counts=True)
        common = values[counts.argsort()[::-1][:NUM_COMMON]]
        areas = common.view(np.uint8).reshape(-1, 4)[:, :3]
        always = np.array([to_rgb(each) for each in ALWAYS]) * 255
        kept = np.concatenate([areas, always]).round().astype(np.int32)
        # By itself the octree merges pale areas with others that are like them.
        image = Image.fromarray(pixels).convert("RGB")
        octree = image.quantize(
            64, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
        )
        rest = np.array(octree.getpalette() or [], dtype=np.int32).reshape(-1, 3)
        colours = np.concatenate([kept, rest])
        self._colours = colours.ravel().tolist()
        # The nearest colour to each of 4096: four bits a channel are enough to tell.
        cube = np.indices((16, 16, 16)).reshape(3, -1, 1) * 17
        distances = ((cube - colours.T[:, None, :]) ** 2).sum(axis=0)
        self._nearest = distances.argmin(axis=1).astype(np.uint8)
        for place, (red, green, blue) in reversed([*enumerate(kept // 16)]):
            self._nearest[red << 8 | green << 4 | blue] = place

    def encode(self, pixels: np.ndarray) -> bytes:
        """`pixels`, (height, width, 4), as a PNG."""
        rgba = np.ascontiguousarray(pixels).view("<u4")[..., 0]
        code = (rgba & 0xF0) << 4 | rgba >> 8 & 0xF0 | rgba >> 20 & 0xF
        image = Image.fromarray(self._nearest[code])
        image.putpalette(self._colours)
        buffer = io.BytesIO()
        image.save(buffer, "png", compress_level=4)
        return buffer.getvalue()
