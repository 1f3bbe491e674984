"""Draws what takes how long: times against sizes."""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import LogLocator
from matplotlib.ticker import NullFormatter

from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import style_axes


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
    figure = RunFigure(figsize=(7.4, 3.6), dpi=100, facecolor="white")
    figure.set_layout_engine("constrained")
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
