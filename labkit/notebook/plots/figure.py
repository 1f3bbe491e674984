"""Figures that any notebook shows as a small PNG, without pyplot."""

import io
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image


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


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG, drawn from scratch."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    return Palette(pixels).encode(pixels)


class Palette:
    """The 64 colours that suit a picture best; encodes it and others like it.

    To find them costs more than all the rest of encoding. A PNG with a palette has
    half the size of a full one.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        """`pixels`: (height, width, 4), 8 bits a channel."""
        image = Image.fromarray(pixels).convert("RGB")
        found = image.quantize(
            64, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
        )
        self._colours = found.getpalette() or []
        colours = np.array(self._colours, dtype=np.int32).reshape(-1, 3)
        # The nearest colour to each of 4096: four bits a channel are enough to tell.
        cube = np.indices((16, 16, 16)).reshape(3, -1, 1) * 17
        distances = ((cube - colours.T[:, None, :]) ** 2).sum(axis=0)
        self._nearest = distances.argmin(axis=1).astype(np.uint8)

    def encode(self, pixels: np.ndarray) -> bytes:
        """`pixels`, (height, width, 4), as a PNG."""
        rgba = np.ascontiguousarray(pixels).view("<u4")[..., 0]
        code = (rgba & 0xF0) << 4 | rgba >> 8 & 0xF0 | rgba >> 20 & 0xF
        image = Image.fromarray(self._nearest[code])
        image.putpalette(self._colours)
        buffer = io.BytesIO()
        image.save(buffer, "png", compress_level=4)
        return buffer.getvalue()
