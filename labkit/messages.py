"""What a rank publishes, and how it is told from what a cell publishes itself."""

from dataclasses import asdict
from typing import Any

import numpy as np

from labkit.checks import is_int
from labkit.checks import is_metric
from labkit.json_files import parse
from labkit.records import COMPONENTS
from labkit.records import KEY
from labkit.records import RECORD
from labkit.records import Averages
from labkit.records import Batch
from labkit.records import Draw
from labkit.records import Measurement
from labkit.records import Note
from labkit.records import Outcome
from labkit.records import Question
from labkit.records import ReplicaNotes

MAX_SEQUENCE = 2**48
"""So many records no rank has: at a million a second they would take nine years."""


def message(name: str, value: Any) -> dict[str, Any]:
    """A published message, distinguished from a user's own by its key."""
    return {KEY: (name, value)}


def is_message(value: Any, rank: int) -> bool:
    """Whether what came from `rank` under the key is a message, and what it says can
    be: that it is read, drawn and written."""
    try:
        match value:
            case ("batch", Batch() as batch):
                return is_batch(batch)
            case ("report", ReplicaNotes() as notes):
                return are_replica_notes(notes)
            case ("report", Measurement() as measured):
                parse(Measurement, asdict(measured))
                return is_measurement(measured)
            case ("report", Averages() as sent):
                parse(Averages, vars(sent))
                return True
            case ("report", Note(text)):
                return isinstance(text, str)
            case ("question", Question() as question):
                parse(Question, vars(question))
                return True
            case ("failing", status):
                return isinstance(status, str)
            case ("outcome", Outcome() as outcome):
                return parse(Outcome, vars(outcome)).rank == rank
    except TypeError:
        return False
    return False


def is_measurement(measured: Measurement) -> bool:
    """Whether it has all that is drawn of it."""
    return set(COMPONENTS) <= set(measured.memory) and measured.moments.is_whole


def is_batch(batch: Batch) -> bool:
    """Whether its records are such, and of metrics that it names."""
    records, names = batch.records, parse(list[str], batch.names)
    return (
        parse(int, batch.sequence) < MAX_SEQUENCE
        and isinstance(records, np.ndarray)
        and records.dtype == RECORD
        and records.ndim == 1
        and bool((records["metric"] < len(names)).all())
        and all(map(is_metric, names))
        and bool(np.isfinite(records["seconds"]).all())
    )


def is_draw(draw: Draw) -> bool:
    """Whether it is of whole numbers."""
    return all(map(is_int, vars(draw).values()))


def are_replica_notes(notes: ReplicaNotes) -> bool:
    """Whether they can be compared with those of another rank."""
    shape = len(parse(list[int], notes.steps)), len(parse(list[str], notes.names))
    return (
        isinstance(notes.values, np.ndarray)
        and notes.values.shape == shape
        and all(map(is_draw, [*notes.draws, *notes.own_draws]))
        and all(map(is_int, (notes.group, notes.seed, notes.num_steps)))
        and all(
            each is None or is_int(each)
            for each in (notes.place, notes.loaded, notes.num_copies)
        )
    )
