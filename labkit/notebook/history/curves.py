"""A run's history as curves of few points, kept up as it grows.

A refresh of the picture pays for what is new, not for all that there is.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from labkit.notebook.history.thinning import MAX_POINTS
from labkit.notebook.history.thinning import Points
from labkit.notebook.history.thinning import extremes
from labkit.records import LOSS_WEIGHT
from labkit.records import NOTICED_LOSS
from labkit.records import STEP_TAKEN

_BLOCK = 2**14
MAX_RANK_LINES = 8
"""More ranks are drawn as a band."""
UNSEEN = frozenset({"samples", "tokens", LOSS_WEIGHT})
"""Metrics that the session puts to count by. They are not drawn, nor are
those with a name in parentheses."""
MEMORY = "(memory)"
"""What the bytes in use, the greatest of each step, go by here; no metric can be called
so."""


@dataclass(frozen=True)
class NonFinite:
    """Where a curve was NaN or infinite."""

    step: int
    """Where it began."""
    word: str
    """"NaN" or "infinite"."""
    lasts: bool
    """Whether no finite value follows."""


class Curve:
    """One metric of one rank, thinned as it grows: every peak is kept.

    The points so far are cut into stretches of equal length, and the least and the
    greatest of each are kept, in order. When these are too many, two stretches
    become one.
    """

    def __init__(self) -> None:
        self.num_values = 0
        self.total = 0.0
        """The sum of all finite values."""
        self.greatest = 0.0
        """Of all finite values; 0 where none is above it."""
        self._first_non_finite: NonFinite | None = None
        self._lasting_non_finite: NonFinite | None = None
        self._stretch = 2
        self._x = np.empty(0)
        self._y = np.empty(0)
        self._rest_x = np.empty(0)
        self._rest_y = np.empty(0)
        self._newest = (np.nan, np.nan)

    def extend(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Append points: (n,) each."""
        if not len(values):
            return
        is_finite = are_finite(values)
        self._note_non_finite(steps, values, is_finite)
        self.num_values += len(values)
        self.total += float(values[is_finite].sum())
        self.greatest = float(values[is_finite].max(initial=self.greatest))
        x = np.concatenate([self._rest_x, steps])
        y = np.concatenate([self._rest_y, np.where(is_finite, values, np.nan)])
        self._newest = float(x[-1]), float(y[-1])
        whole = len(x) // self._stretch * self._stretch
        kept_x, kept_y = extremes(x[:whole], y[:whole], self._stretch)
        self._x = np.concatenate([self._x, kept_x])
        self._y = np.concatenate([self._y, kept_y])
        # Copies: a view would keep all of the batch.
        self._rest_x, self._rest_y = x[whole:].copy(), y[whole:].copy()
        while len(self._x) > MAX_POINTS:
            self._halve()

    def _halve(self) -> None:
        self._stretch *= 2
        whole = len(self._x) // 4 * 4
        # An odd stretch at the end becomes a part of the next one.
        self._rest_x = np.concatenate([self._x[whole:], self._rest_x])
        self._rest_y = np.concatenate([self._y[whole:], self._rest_y])
        self._x, self._y = extremes(self._x[:whole], self._y[:whole], 4)

    def _note_non_finite(
        self, steps: np.ndarray, values: np.ndarray, is_finite: np.ndarray
    ) -> None:
        good, bad = np.flatnonzero(is_finite), np.flatnonzero(~is_finite)
        if len(bad) and self._first_non_finite is None:
            self._first_non_finite = non_finite_at(steps[bad[0]], values[bad[0]])
        if is_finite[-1]:
            self._lasting_non_finite = None
        elif len(good) or self._lasting_non_finite is None:
            begin = good[-1] + 1 if len(good) else 0
            non_finite = non_finite_at(steps[begin], values[begin], lasts=True)
            self._lasting_non_finite = non_finite

    @property
    def non_finite(self) -> NonFinite | None:
        """What lasts; or else the first that there was; or None."""
        return self._lasting_non_finite or self._first_non_finite

    def points(self) -> Points:
        """What to draw: steps and values, (n,) each, the newest value last."""
        rest = self._rest_x, self._rest_y
        if len(self._rest_x) > 4:
            rest = extremes(*rest, len(self._rest_x))
        x = np.concatenate([self._x, rest[0]])
        y = np.concatenate([self._y, rest[1]])
        if len(x) and x[-1] != self._newest[0]:
            x, y = np.append(x, self._newest[0]), np.append(y, self._newest[1])
        return x, y


class Spread:
    """One metric over all ranks, step by step: least, median, greatest and mean.

    A step counts when every rank has taken it. Thinned as a `Curve` is, to the mean of
    each stretch, and to the least and greatest of the limits.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._pending: dict[int, list[np.ndarray]] = {rank: [] for rank in ranks}
        self._through = -np.inf
        self._stretch = 1
        self._kept = np.empty((5, 0))
        self._rest = np.empty((5, 0))

    def extend(self, rank: int, steps: np.ndarray, values: np.ndarray) -> None:
        """Append points of one rank: (n,) each."""
        if len(steps):
            self._pending[rank].append(np.stack([steps.astype(float), values]))

    def settle(self, through: float) -> None:
        """Every rank has taken the steps up to `through`."""
        steps = [part[0].max() for parts in self._pending.values() for part in parts]
        through = min(through, max(steps, default=-np.inf))
        if through <= self._through:
            return
        taken = []
        for rank, parts in self._pending.items():
            points = np.concatenate(parts, axis=1) if parts else np.empty((2, 0))
            is_due = points[0] <= through
            # What comes later than its step is in the rank's own curve alone.
            taken.append(points[:, is_due & (points[0] > self._through)])
            self._pending[rank] = [points[:, ~is_due]] if not is_due.all() else []
        self._through = through
        steps = taken[0][0]
        if not any(points.shape[1] for points in taken):
            return
        is_lockstep = all(np.array_equal(points[0], steps) for points in taken)
        if is_lockstep and (np.diff(steps) > 0).all():
            self._append(over_ranks(steps, np.stack([points[1] for points in taken])))
        else:
            self._append(by_step(*np.concatenate(taken, axis=1)))

    def _append(self, rows: np.ndarray) -> None:
        rows = np.concatenate([self._rest, rows], axis=1)
        whole = rows.shape[1] // self._stretch * self._stretch
        new = summarize(rows[:, :whole], self._stretch)
        self._kept = np.concatenate([self._kept, new], axis=1)
        self._rest = rows[:, whole:].copy()
        while self._kept.shape[1] > MAX_POINTS // 2:
            whole = self._kept.shape[1] // 2 * 2
            self._stretch *= 2
            self._rest = np.concatenate([self._kept[:, whole:], self._rest], axis=1)
            self._kept = summarize(self._kept[:, :whole], 2)

    def rows(self) -> np.ndarray:
        """(5, n): step, least, median, greatest, mean."""
        rest = self._rest
        if rest.shape[1] > 1:
            rest = summarize(rest, rest.shape[1])
        return np.concatenate([self._kept, rest], axis=1)


class Records(Protocol):
    """What curves are made of: a `Collector`."""

    ranks: list[int]
    steps: dict[int, int]

    def records(self, rank: int) -> np.ndarray:
        """All records of a rank so far."""

    def metrics(self, rank: int) -> list[str]:
        """The names of a rank's metrics, by the id that its records have."""


class Curves:
    """The curves of a run: by rank and metric, and over the ranks."""

    def __init__(self, collector: Records) -> None:
        self._collector = collector
        self.ranks = collector.ranks
        self.lock = threading.RLock()
        """To be held while curves are read: a run may be drawn in one thread and asked
        for its state in another."""
        self._numbers: dict[int, dict[str, int]] = {rank: {} for rank in self.ranks}
        self._clear()

    def _clear(self) -> None:
        self._num_seen = dict.fromkeys(self.ranks, 0)
        self._last_step = dict.fromkeys(self.ranks, -np.inf)
        self._curves: dict[tuple[int, str], Curve] = {}
        self._spreads: dict[str, Spread] = {}

    def update(self, *, is_final: bool = False) -> None:
        """Take what the collector has received since the last call.

        When the run is over, steps that not every rank took count too.
        """
        with self.lock:
            # In the reverse of the order in which a batch is added: every record has
            # its name, though another thread may add more meanwhile.
            records = {rank: self._collector.records(rank) for rank in self.ranks}
            for rank in self.ranks:
                self._name(rank)
            new = {rank: records[rank][self._num_seen[rank] :] for rank in self.ranks}
            # In blocks, of all ranks in turns: a long history that is taken at once,
            # as that of a run from disk, would need several times its memory.
            for begin in range(0, max(map(len, new.values()), default=0), _BLOCK):
                for rank in self.ranks:
                    self._take(rank, new[rank][begin : begin + _BLOCK])
                # Records of the last step may still be on their way.
                self._settle(min(self._last_step.values()) - 1)
            if is_final:
                self._settle(np.inf)

    def _settle(self, through: float) -> None:
        for spread in self._spreads.values():
            spread.settle(through)

    def _name(self, rank: int) -> None:
        names = self._collector.metrics(rank)
        numbers = {name: number for number, name in enumerate(names)}
        if not names:
            return
        if not self._numbers[rank].items() <= numbers.items():
            # The cell logs a loss of its own, after all: the noticed one is none.
            self._clear()
        self._numbers[rank] = numbers

    def _take(self, rank: int, records: np.ndarray) -> None:
        self._num_seen[rank] += len(records)
        if not len(records):
            return
        newest = float(records["step"].max())
        self._last_step[rank] = max(self._last_step[rank], newest)
        is_own = np.ones(len(records), dtype=bool)
        for name, number in self._numbers[rank].items():
            is_of = records["metric"] == number
            if name.startswith("("):
                is_own &= ~is_of | (name in (NOTICED_LOSS, STEP_TAKEN))
                continue
            found = records[is_of]
            self._extend(rank, name, found["step"], found["value"])
        own = records[is_own]
        if len(own):
            steps = own["step"]
            starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
            greatest = np.maximum.reduceat(own["memory_bytes"], starts)
            is_known = greatest > 0
            self._extend(
                rank, MEMORY, steps[starts][is_known], greatest[is_known].astype(float)
            )

    def _extend(
        self, rank: int, name: str, steps: np.ndarray, values: np.ndarray
    ) -> None:
        if not len(steps):
            return
        self._curves.setdefault((rank, name), Curve()).extend(steps, values)
        if name not in UNSEEN and (name != MEMORY or len(self.ranks) > MAX_RANK_LINES):
            if name not in self._spreads:
                self._spreads[name] = Spread(self.ranks)
            self._spreads[name].extend(rank, steps, values)

    # ---- what there is ----

    def metrics(self) -> list[str]:
        """What is drawn beside loss and memory, in the order of first logging."""
        names = [name for _, name in self._curves if name not in UNSEEN]
        return [n for n in dict.fromkeys(names) if n not in ("loss", MEMORY)]

    def curve(self, rank: int, metric: str) -> Curve:
        """One rank's curve; an empty one where it has none."""
        return self._curves.get((rank, metric)) or Curve()

    def num_steps(self, rank: int) -> int:
        """Steps that the rank has taken from its first record on: a run that resumes
        does not begin at 0."""
        records = self._collector.records(rank)
        first = int(records["step"][0]) if len(records) else 1
        return self._collector.steps[rank] - first + 1

    def spread(self, metric: str) -> np.ndarray:
        """(5, n): step, least, median, greatest and mean over the ranks."""
        spread = self._spreads.get(metric)
        return spread.rows() if spread else np.empty((5, 0))

    def per_step(self, metric: str) -> float | None:
        """The mean of a metric at one step, summed over the ranks; None where no rank
        has it."""
        found = [self.curve(rank, metric) for rank in self.ranks]
        found = [curve for curve in found if curve.num_values]
        if not found:
            return None
        return sum(curve.total / curve.num_values for curve in found)

    def non_finites(self) -> dict[tuple[int, str], NonFinite]:
        """Where a rank's metric was NaN or infinite, by rank and metric."""
        return {
            key: curve.non_finite
            for key, curve in self._curves.items()
            if curve.non_finite
        }


def are_finite(values: np.ndarray) -> np.ndarray:
    """Which values are numbers to reckon with: sums and squares of them are finite."""
    return np.abs(values) < 1e150


def non_finite_at(step: int, value: float, *, lasts: bool = False) -> NonFinite:
    """What begins with a value that is not finite."""
    return NonFinite(int(step), "NaN" if np.isnan(value) else "infinite", lasts)


def over_ranks(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What `by_step` returns, of values that lie in order: (num_ranks, num_steps)."""
    values = np.sort(np.where(are_finite(values), values, np.nan), axis=0)
    counts = (~np.isnan(values)).sum(axis=0)  # NaN comes last
    some, places = np.maximum(counts, 1), np.arange(len(steps))
    low, high = values[0], values[some - 1, places]
    middle = (values[(some - 1) // 2, places] + values[some // 2, places]) / 2
    return np.stack([steps, low, middle, high, mean_of_finite(values.T)])


def by_step(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(5, number of steps): step, least, median, greatest and mean of its values.

    Only finite values count; a step without has NaN.
    """
    values = np.where(are_finite(values), values, np.nan)
    order = np.lexsort((values, steps))  # NaN comes last in its step
    steps, values = steps[order], values[order]
    starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
    is_finite = ~np.isnan(values)
    counts = np.add.reduceat(is_finite.astype(int), starts)
    some = np.maximum(counts, 1)
    median = (values[starts + (some - 1) // 2] + values[starts + some // 2]) / 2
    mean = np.add.reduceat(np.where(is_finite, values, 0.0), starts) / some
    return np.stack(
        [
            steps[starts],
            values[starts],
            median,
            values[starts + some - 1],
            np.where(counts, mean, np.nan),
        ]
    )


def summarize(rows: np.ndarray, stretch: int) -> np.ndarray:
    """Rows of `by_step`, (5, n * stretch), as (5, n): each `stretch` steps as one."""
    if stretch == 1:
        return rows
    blocks = rows.reshape(5, -1, stretch)
    steps, low, middle, high, mean = blocks
    return np.stack(
        [
            steps[:, -1],
            np.fmin.reduce(low, axis=1),
            mean_of_finite(middle),
            np.fmax.reduce(high, axis=1),
            mean_of_finite(mean),
        ]
    )


def mean_of_finite(blocks: np.ndarray) -> np.ndarray:
    """The mean of each row of (n, m) without its NaN; NaN where that is all."""
    is_finite = ~np.isnan(blocks)
    counts = is_finite.sum(axis=1)
    sums = np.where(is_finite, blocks, 0.0).sum(axis=1)
    return np.where(counts, sums / np.maximum(counts, 1), np.nan)


def smooth(values: np.ndarray, width: float) -> np.ndarray:
    """The line through the values about each one, without NaN.

    They are weighted with exp(-distance / width), to both sides: a mean of what was
    before would lag behind a falling loss, and so would any mean at the ends. At the
    beginning, where a loss falls fastest, fewer values count.
    """
    if width < 0.5 or len(values) < 3:
        return values
    found = _smooth_evenly(values, width)
    beginning = values[: int(8 * width) + 3]
    fine = _smooth_evenly(beginning, max(0.5, width / 8))
    share = np.exp(-np.arange(len(beginning)) / width)
    found[: len(beginning)] += share * (fine - found[: len(beginning)])
    return found


def _smooth_evenly(values: np.ndarray, width: float) -> np.ndarray:
    """`smooth`, with as many values at the beginning as anywhere."""
    reach = min(int(5 * width) + 1, len(values))
    distance = np.arange(-reach, reach + 1)
    kernel = np.exp(-np.abs(distance) / width)
    is_finite = ~np.isnan(values)
    finite, weight = np.where(is_finite, values, 0.0), is_finite.astype(float)

    def about(each: np.ndarray, power: int) -> np.ndarray:
        """Sums of each value times its weight and distance to that power."""
        return np.convolve(each, kernel * (-distance) ** power)[reach:-reach]

    w0, w1, w2 = (about(weight, power) for power in range(3))
    y0, y1 = (about(finite, power) for power in range(2))
    spread = w0 * w2 - w1**2
    is_line = spread > 1e-9 * w0**2
    line = (w2 * y0 - w1 * y1) / np.where(is_line, spread, 1.0)
    found = np.where(is_line, line, y0 / np.where(w0 > 0, w0, 1.0))
    return np.where(is_finite, found, np.nan)


def is_noisy(values: np.ndarray) -> bool:
    """Whether a curve goes up and down rather than its way."""
    finite = values[~np.isnan(values)]
    if len(finite) < 20:
        return False
    travelled = np.abs(np.diff(finite)).sum()
    return bool(travelled > 3 * (finite.max() - finite.min()))
