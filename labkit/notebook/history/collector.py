"""Receives the ranks' records of one run and keeps its history."""

import math
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from labkit.notebook.history.curves import Curves
from labkit.records import CHECKPOINT
from labkit.records import NOTES
from labkit.records import NOTICED_LOSS
from labkit.records import PARTS
from labkit.records import PROGRESS
from labkit.records import RECORD
from labkit.records import STEP_TAKEN
from labkit.records import Averages
from labkit.records import Batch
from labkit.records import Measurement
from labkit.records import Moments
from labkit.records import Note
from labkit.records import Progress
from labkit.records import ReplicaNotes

_AGAIN = "(again)"  # no metric can be called so
_FIELDS = {name: field for field, name in PROGRESS.items()}
_LEADING = ["step", "rank", "seconds", "loss", "memory_bytes"]
_LONG = 2**20
_ROOM = 2**24
"""Elements that an array which has become `_LONG` has room for. Room that was never
written to takes no memory, and to copy a long array takes it twice."""


class Collector:
    """The records of a run, by rank, in the order in which they were logged.

    A run that resumes from a checkpoint begins at `first_step`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        first_step: int = 0,
        *,
        servers: Sequence[int] = (),
    ) -> None:
        self.ranks = list(ranks)
        """That run the cell, and take steps."""
        self.servers = list(servers)
        """That serve them: they have no records, and are measured."""
        self.progress = dict.fromkeys(ranks, Progress())
        self.steps = dict.fromkeys(ranks, first_step)
        self.num_records = dict.fromkeys(ranks, 0)
        self.num_received = dict.fromkeys(ranks, 0)
        """Records up to the last one that came, by their sequence numbers."""
        self.lost = dict.fromkeys(ranks, 0)
        """Records that never came, by their sequence numbers."""
        self.measurements: dict[int, list[Measurement]] = {
            rank: [] for rank in (*ranks, *servers)
        }
        """Of the steps that were measured, in order."""
        self.averages: dict[int, Averages] = {}
        """What ranks have sent between the steps that were measured."""
        self.replica_notes: dict[int, ReplicaNotes] = {}
        self.notes: list[str] = []
        """What ranks said of the cell's loop, each sentence once."""
        self._notices_steps: set[int] = set()
        """Ranks whose optimizer steps are noticed; for the others `log` counts them."""
        self._names: dict[int, list[str]] = {rank: [] for rank in ranks}
        self._records = {rank: GrowingArray(RECORD) for rank in ranks}
        self.num_restarts = 0
        self._raw_names: dict[int, list[str]] = {rank: [] for rank in ranks}
        """As `_names`, but of a noticed loss by the name that ranks give it."""
        self._checkpoints: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
        """How many records came before a rank's checkpoint, by its step."""
        self._first_step = first_step
        self._num_kept = dict.fromkeys(ranks, 0)
        """Records from before the last restart."""
        self._restarted_at = 0.0
        self.curves = Curves(self)
        """The history as curves of few points; `update` brings them up to it."""

    @property
    def num_lost(self) -> int:
        """Records that never came, of all ranks."""
        return sum(self.lost.values())

    def add(self, rank: int, batch: Batch) -> None:
        """Take one batch of a rank."""
        self._miss(rank, before=batch.sequence)
        self.num_received[rank] = batch.sequence + len(batch.records)
        records = self._take_notes(rank, batch)
        names = list(batch.names)
        if self.num_restarts:
            records, names = self._joined(rank, records, names)
        self._raw_names[rank] = list(names)
        if NOTICED_LOSS in names and "loss" not in names:
            names[names.index(NOTICED_LOSS)] = "loss"
        self._names[rank] = names
        if len(records):
            self._records[rank].extend(records)
            self.num_records[rank] += len(records)

    def _take_notes(self, rank: int, batch: Batch) -> np.ndarray:
        """The batch's records without those that report progress."""
        records = batch.records
        ids = {name: number for number, name in enumerate(batch.names)}

        def are(names: Iterable[str]) -> np.ndarray:
            return np.isin(records["metric"], [ids[n] for n in names if n in ids])

        for name, field in _FIELDS.items():
            if len(values := records["value"][are([name])]):
                change = {field: int(values[-1])}
                self.progress[rank] = replace(self.progress[rank], **change)
        checkpoints = are([CHECKPOINT])
        if checkpoints.any():
            before = self.num_records[rank] + np.cumsum(~are(NOTES))[checkpoints]
            steps = records["step"][checkpoints]
            self._checkpoints[rank] |= dict(zip(steps.tolist(), before, strict=True))
        is_note, is_step = are(NOTES), are([NOTICED_LOSS, STEP_TAKEN])
        if is_step.any():
            self._notices_steps.add(rank)
        elif rank in self._notices_steps:
            return records[~is_note]
        counting = is_step if is_step.any() else ~is_note
        last = int(records["step"][counting].max(initial=0))
        self.steps[rank] = last if is_step.any() else max(self.steps[rank], last)
        return records[~is_note]

    def _joined(
        self, rank: int, records: np.ndarray, names: list[str]
    ) -> tuple[np.ndarray, list[str]]:
        """Records since the last restart by the ids and the clock of those before."""
        kept = self._raw_names[rank]
        joined = [*kept, *(name for name in names if name not in kept)]
        ids = np.array([joined.index(name) for name in names], "u2")
        records = records.copy()
        records["metric"] = ids[records["metric"]]
        records["seconds"] += self._restarted_at
        return records, joined

    def start_over(self, rank: int) -> None:
        """Forget a rank's records; not those from before the last restart."""
        self._keep(rank, self._num_kept[rank])
        self.curves = Curves(self)

    def restart(self, step: int, seconds: float) -> None:
        """The run resumes from its checkpoint of `step`, `seconds` after it began:
        drop the records after that. Each rank's records count from 0 again."""
        self.num_restarts += 1
        self._first_step, self._restarted_at = step, seconds
        for rank in self.ranks:
            self._num_kept[rank] = self._checkpoints[rank].get(step, 0)
            self._keep(rank, self._num_kept[rank])
        self.curves = Curves(self)

    def reset(self) -> None:
        """Forget all records, and that there were restarts."""
        self.num_restarts = 0
        self._num_kept = dict.fromkeys(self.ranks, 0)
        for rank in self.ranks:
            self._raw_names[rank] = []
            self.start_over(rank)

    def _keep(self, rank: int, num_records: int) -> None:
        kept = self.records(rank)[:num_records]
        self._records[rank] = GrowingArray(RECORD)
        self._records[rank].extend(kept)
        self.num_records[rank] = num_records
        self.num_received[rank] = self.lost[rank] = 0
        self.steps[rank] = self._first_step
        self._checkpoints[rank] = {
            step: before
            for step, before in self._checkpoints[rank].items()
            if before <= num_records
        }

    def add_report(
        self, rank: int, report: Measurement | Averages | ReplicaNotes | Note
    ) -> None:
        """Take what a rank measured in one step, or says of the loop."""
        if isinstance(report, Measurement):
            measured = self.measurements[rank]
            if measured:  # one step's moments are enough to draw
                measured[-1] = replace(measured[-1], moments=Moments())
            measured.append(report)
        elif isinstance(report, Averages):
            self.averages[rank] = report
        elif isinstance(report, ReplicaNotes):
            self.replica_notes[rank] = report
        elif report.text not in self.notes:
            self.notes.append(report.text)

    def finish(self, rank: int, num_records: int) -> None:
        """Take a rank's last word: how many records it sent."""
        self._miss(rank, before=num_records)

    def _miss(self, rank: int, *, before: int) -> None:
        """Note that the records up to this one never came."""
        self.lost[rank] += max(0, before - self.num_received[rank])
        self.num_received[rank] = before

    def num_new(self, rank: int) -> int:
        """Records of a rank since the last restart."""
        return self.num_records[rank] - self._num_kept[rank]

    def metrics(self, rank: int) -> list[str]:
        """The names of a rank's metrics, by id: the place that its records have."""
        return list(self._names[rank])

    def records(self, rank: int) -> np.ndarray:
        """All records of a rank so far: (num_records,) of `records.RECORD`.

        Costs nothing: a view. Later batches only add to its end.
        """
        return self._records[rank].view()

    def series(self, rank: int, metric: str) -> np.ndarray:
        """The records of one metric of a rank, in order; empty where it has none."""
        names, records = self._names[rank], self.records(rank)
        if metric not in names:
            return records[:0]
        return records[records["metric"] == names.index(metric)]

    def ends(self, rank: int, metric: str) -> tuple[float, float]:
        """The first and the last value of a rank's metric; NaN where it has none."""
        names = self._names[rank]
        number = names.index(metric) if metric in names else -1
        records = self.records(rank)
        is_of = records["metric"] == number
        if not is_of.any():
            return math.nan, math.nan
        first, last = is_of.argmax(), len(is_of) - 1 - is_of[::-1].argmax()
        return float(records["value"][first]), float(records["value"][last])

    def last_step(self, rank: int, metric: str, through: float = np.inf) -> int | None:
        """The last step, up to `through`, at which a rank's metric was a number; None
        where it was at none."""
        if metric not in self._names[rank]:
            return None
        records = self.records(rank)
        is_there = records["metric"] == self._names[rank].index(metric)
        is_there &= ~np.isnan(records["value"])
        is_there &= records["step"] <= through
        if not is_there.any():
            return None
        first = np.iinfo("i8").min
        return int(records["step"].max(where=is_there, initial=first))

    def history(self, step: int | None = None) -> pd.DataFrame:
        """One row a rank and step: step, rank, seconds, loss, memory_bytes, metrics.

        A metric that was logged twice at one step has a row for each time. With `step`
        it has that step alone.
        """
        frames = [self._history_of(rank, step) for rank in self.ranks]
        frame = pd.concat([f for f in frames if len(f)] or frames, ignore_index=True)
        frame = frame.sort_values(["step", "rank"], kind="stable", ignore_index=True)
        others = [name for name in frame.columns if name not in _LEADING]
        return frame[[*_LEADING, *others]]

    def _history_of(self, rank: int, step: int | None) -> pd.DataFrame:
        found = self.records(rank)
        records = pd.DataFrame(found if step is None else found[found["step"] == step])
        if records.empty:
            return pd.DataFrame(columns=_LEADING)
        names = self._names[rank]
        if "loss" in names and NOTICED_LOSS in names:  # the cell's own word counts
            records = records[records["metric"] != names.index(NOTICED_LOSS)].copy()
        if STEP_TAKEN in names:  # by each of several optimizers
            is_again = records.duplicated(["metric", "step"], keep="last")
            is_again &= records["metric"] == names.index(STEP_TAKEN)
            records = records[~is_again].copy()
        records[_AGAIN] = records.groupby(["metric", "step"]).cumcount()
        rows = records.groupby(["step", _AGAIN])
        values = records.pivot(index=["step", _AGAIN], columns="metric", values="value")
        values.columns = pd.Index([names[int(metric)] for metric in values.columns])
        values = values.drop(columns=STEP_TAKEN, errors="ignore")
        frame = values.join(rows[["seconds", "memory_bytes"]].last()).reset_index()
        frame = frame.drop(columns=_AGAIN).assign(rank=rank)
        # Nothing is known before the first step that is measured.
        frame["memory_bytes"] = frame["memory_bytes"].where(frame["memory_bytes"] > 0)
        return frame.reindex(columns=[*dict.fromkeys([*_LEADING, *frame.columns])])


class GrowingArray:
    """An array that grows at its end; an element is copied twice at most, on average.

    A view stays valid, and as long as it was, while the array grows.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._elements = np.empty(0, dtype=dtype)
        self._length = 0

    def extend(self, added: np.ndarray) -> None:
        """Append `added`: (n,) of the same dtype."""
        length = self._length + len(added)
        if length > len(self._elements):
            room = max(length, 2 * self._length)
            if room > _LONG:
                room = max(room, _ROOM)
            larger = np.empty(room, self._elements.dtype)
            larger[: self._length] = self.view()
            self._elements = larger
        self._elements[self._length : length] = added
        self._length = length

    def view(self) -> np.ndarray:
        """What it holds: (length,)."""
        return self._elements[: self._length]


def of_peak_rank(moments: pd.DataFrame) -> pd.DataFrame:
    """Of `Run.step_memory` the rows of the rank whose peak is highest."""
    if moments.empty:
        return moments
    place = int(moments[[*PARTS]].sum(axis=1).to_numpy().argmax())
    return moments[moments["rank"] == moments["rank"].iloc[place]]
