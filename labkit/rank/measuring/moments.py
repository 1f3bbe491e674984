"""What tensors hold over the moments of one step, by what they are."""

import time

import numpy as np

from labkit.records import PARTS
from labkit.records import PHASES
from labkit.records import Moments

NUM_MOMENTS = 160
MAX_CHANGES = 500_000
"""Of a step: with more there are no moments, as where a loop has ended that was to be
measured, and the cell goes on."""
MIN_OF_PHASE = 6
"""How many moments a phase has at least, however short it is."""
_PART = {name: place for place, name in enumerate(PARTS)}
_PHASE = {name: place for place, name in enumerate(PHASES)}
_ACTIVATIONS, _OTHER = _PART["activations"], _PART["other"]


class MomentLog:
    """Storages as they come, change their size and go, each known by a number.

    What a storage is may be found out later, as of a gradient after the backward pass
    that has made it: it counts as that from its beginning.
    """

    def __init__(self) -> None:
        self._began = self._now = time.perf_counter()
        self._changes: list[tuple[float, int, int]] = []
        """When, which storage, and by how many bytes. Appended to at any moment: where
        garbage is collected storages go."""
        self._parts: dict[int, int] = {}
        self._phases: list[tuple[float, int]] = [(0.0, 0)]
        self._num_storages = 0

    def start(self) -> None:
        """All that is there before the step is known."""
        self._began = time.perf_counter()

    def add(self, num_bytes: int) -> int:
        """There is a storage of so many bytes; its number."""
        number = self._num_storages
        self._num_storages += 1
        self.change(number, num_bytes)
        return number

    def change(
        self, number: int, num_bytes: int, *, is_seen_late: bool = False
    ) -> None:
        """It has so many bytes more, or fewer; if `is_seen_late`, since before the
        operator that has just run."""
        if len(self._changes) < MAX_CHANGES:
            when = self._now if is_seen_late else time.perf_counter()
            self._changes.append((when, number, num_bytes))

    def tick(self) -> None:
        """An operator has run."""
        self._now = time.perf_counter()

    def is_part(self, number: int, part: str) -> None:
        """It is one of these `records.PARTS`, if it was not found to be another."""
        if self._parts.get(number, _OTHER) == _OTHER:
            self._parts[number] = _PART[part]

    def is_taken(self, number: int) -> None:
        """An operator has taken it that none has made. In a forward pass it is older
        than the step; later some are made without an operator, as FSDP's buffers."""
        if self._phases[-1][1] == _PHASE["forward"]:
            self._parts.setdefault(number, _OTHER)

    def enter(self, phase: str) -> None:
        """One of `records.PHASES` begins."""
        begin, last = self._phases[-1]
        if last == _PHASE["step"] and phase != "step":
            # It was none: another microbatch has followed.
            last = _PHASE["forward"]
            self._phases[-1] = begin, last
        if last != _PHASE[phase]:
            self._phases.append((time.perf_counter() - self._began, _PHASE[phase]))

    def end_step(self) -> None:
        """An optimizer has stepped; a forward pass follows, or another's step."""
        self._phases.append((time.perf_counter() - self._began, _PHASE["forward"]))

    def moments(self) -> Moments:
        """The whole step, at no more than some 200 moments: of those close to each
        other the one at which most was held."""
        if len(self._changes) == MAX_CHANGES:
            return Moments()
        changes = sorted(self._changes, key=lambda change: change[0])
        held = np.zeros((len(changes), len(PARTS)), dtype=np.int64)
        for place, (_, number, num_bytes) in enumerate(changes):
            held[place, self._parts.get(number, _ACTIVATIONS)] = num_bytes
        held = held.cumsum(axis=0)
        seconds = np.array([when for when, _, _ in changes]) - self._began
        start = max(0, int(np.searchsorted(seconds, 0.0)) - 1)
        held, seconds = held[start:], np.maximum(seconds[start:], 0.0)
        begins = [begin for begin, _ in self._phases]
        phases = np.searchsorted(begins, seconds, side="right") - 1
        rows = _thin(seconds, phases, held.sum(axis=1))
        return Moments(
            seconds=seconds[rows].round(6).tolist(),
            phases=[self._phases[place][1] for place in phases[rows].tolist()],
            held={
                name: np.maximum(held[rows, place], 0).tolist()
                for name, place in _PART.items()
            },
        )


def _thin(seconds: np.ndarray, phases: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """The places of the moments that are kept, in order."""
    if not len(seconds):
        return np.empty(0, dtype=int)
    duration = max(seconds[-1], 1e-9)
    bins = np.zeros(len(seconds), dtype=int)
    num_bins = 0
    for phase in np.unique(phases):
        places = np.flatnonzero(phases == phase)
        begin, end = seconds[places[0]], seconds[places[-1]]
        count = max(MIN_OF_PHASE, int(NUM_MOMENTS * (end - begin) / duration))
        share = (seconds[places] - begin) / max(end - begin, 1e-9)
        bins[places] = num_bins + np.minimum((share * count).astype(int), count - 1)
        num_bins += count
    # Within a bin the greatest total comes last.
    by_bin = np.lexsort((totals, bins))
    is_last = np.append(bins[by_bin][1:] != bins[by_bin][:-1], True)
    return np.unique(np.append(by_bin[is_last], [0, len(seconds) - 1]))
