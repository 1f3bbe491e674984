"""Thins a curve to as many points as can be seen, and keeps every peak."""

import numpy as np

MAX_POINTS = 1000
"""Points of one curve: three for each pixel that a panel is wide."""

Points = tuple[np.ndarray, np.ndarray]


def thin(x: np.ndarray, y: np.ndarray) -> Points:
    """About `MAX_POINTS` points at most, none twice, the last among them; (n,) each."""
    stretch = -(-2 * len(x) // MAX_POINTS)
    if stretch <= 2:
        return x, y
    last = len(y) - 1
    # The last stretch is filled up with its last value.
    filled = np.append(y, np.full(-len(y) % stretch, y[-1]))
    keep = np.unique(np.append(extreme_places(filled, stretch).clip(max=last), last))
    return x[keep], y[keep]


def extremes(x: np.ndarray, y: np.ndarray, stretch: int) -> Points:
    """The least and the greatest of each `stretch` points, in order; NaN where there is
    no other. `x` and `y` are (n * stretch,), the results (2 * n,)."""
    if stretch == 2 or not len(y):
        return x, y
    places = extreme_places(y, stretch)
    return x[places], y[places]


def extreme_places(y: np.ndarray, stretch: int) -> np.ndarray:
    """Where these are: (2 * n,), of (n * stretch,) values."""
    blocks = y.reshape(-1, stretch)
    is_nan = np.isnan(blocks)
    low = np.where(is_nan, np.inf, blocks).argmin(axis=1)
    # The last of the greatest, so that a flat stretch is as long as it was.
    high = np.where(is_nan, -np.inf, blocks)[:, ::-1].argmax(axis=1)
    places = np.sort(np.stack([low, stretch - 1 - high], axis=1), axis=1)
    return (places + np.arange(0, len(y), stretch)[:, None]).ravel()
