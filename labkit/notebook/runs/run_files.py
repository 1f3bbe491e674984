"""A run's folder on disk: `run.json`, `records.parquet` and the ranks' journals."""

import contextlib
import json
import math
import os
import shutil
import typing
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np

from labkit.checks import is_int
from labkit.checks import is_number
from labkit.checks import is_run_name
from labkit.checks import short_repr
from labkit.notebook.history.collector import Collector
from labkit.records import NAMES_FILE
from labkit.records import RECORD
from labkit.records import RECORDS_FILE
from labkit.records import RESTART_FOLDER
from labkit.records import UNREAD
from labkit.records import UNWRITTEN
from labkit.records import Batch

INFO_FILE = "run.json"
TABLE_FILE = "records.parquet"

MAX_INFO_BYTES = 2**26
_LATEST = 4e9
"""In the year 2096: a time beyond it is none."""
_TYPES = {
    "rank": "int32",
    "metric": "dictionary<values=string, indices=int32, ordered=0>",
    "step": "int64",
    "seconds": "double",
    "memory_bytes": "int64",
    "value": "double",
}
_UNREAD_BITS = np.float64(UNREAD).view("u8")


# ---- run.json ----


def write_info(folder: Path, info: Mapping[str, Any]) -> None:
    """Write what is known of a run. A reader finds this or what was there before."""
    text = json.dumps(plain(info), indent=1, allow_nan=False)
    _replace(folder / INFO_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def read_info(folder: Path) -> dict[str, Any]:
    """What `write_info` wrote. OSError or ValueError where that is not there.

    What identifies a run is checked; the rest is when the run is opened.
    """
    path = folder / INFO_FILE
    if not path.is_file() or path.stat().st_size > MAX_INFO_BYTES:
        raise ValueError(f"{path} is no file of a run")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    if not isinstance(info, dict):
        raise ValueError(f"{path} does not describe a run")
    for key, is_right in _NEEDED.items():
        if not is_right(info.get(key)):
            found = short_repr(info[key]) if key in info else "not there"
            raise ValueError(f"{path} does not describe a run: its {key!r} is {found}")
    return info


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Files of a run that are damaged, or not a run's, are a ValueError."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(
            f"{folder} has no run that can be read: {type(error).__name__}: {error}"
        ) from error


def known(kind: Any, values: Mapping[str, Any]) -> Any:
    """A `kind` of what it knows of `values`: a later version may have written more.

    TypeError where a value is of another type than the field.
    """
    types = typing.get_type_hints(kind)
    found = {key: value for key, value in values.items() if key in types}
    for key, value in found.items():
        if not fits(value, types[key]):
            raise TypeError(f"{key} is {short_repr(value)}")
    return kind(**found)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value that JSON gave is of the type `kind`; of a list or dict not what
    is in it."""
    if isinstance(kind, UnionType):
        return any(fits(value, each) for each in typing.get_args(kind))
    wanted = typing.get_origin(kind) or kind
    return isinstance(value, int | float if wanted is float else wanted)


def is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value < _LATEST


def are_ranks(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) == len(set(map(repr, value)))
        and all(is_int(rank) and 0 <= rank < 2**20 for rank in value)
    )


def is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


_NEEDED = {
    "name": is_run_name,
    "strategy": is_word,
    "state": is_word,
    "ranks": are_ranks,
    "began": is_time,
    "host": lambda value: isinstance(value, str),
    "pid": lambda value: is_int(value) and 0 <= value < 2**31,
    "pid_created": is_time,
}


def plain(value: Any) -> Any:
    """`value` as JSON has it: what it cannot hold by its repr, NaN as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else repr(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return repr(value)


def _replace(path: Path, write: Any) -> None:
    """Put a file in place whole, or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- records ----


def write_records(folder: Path, collector: Collector) -> None:
    """Write all records as one table; if none was lost the journals are not needed.

    Columns: rank, metric, step, seconds, memory_bytes, value. A rank's rows are in the
    order of logging.
    """
    import pyarrow as pa
    from pyarrow import parquet

    tables = []
    for rank in collector.ranks:
        records = collector.records(rank)
        names = pa.array(collector.metrics(rank), pa.string())
        ids = pa.array(records["metric"].astype("i4"))
        columns = {
            "rank": pa.array(np.full(len(records), rank, "i4")),
            "metric": pa.DictionaryArray.from_arrays(ids, names),
        }
        for name in ("step", "seconds", "memory_bytes", "value"):
            columns[name] = pa.array(np.ascontiguousarray(records[name]))
        tables.append(pa.table(columns))
    table = pa.concat_tables(tables).unify_dictionaries()
    _replace(folder / TABLE_FILE, lambda path: parquet.write_table(table, path))
    if collector.num_lost:
        return
    for rank in collector.ranks:
        for name in (RECORDS_FILE, NAMES_FILE):
            (folder / name.format(rank)).unlink(missing_ok=True)
    for number in range(collector.num_restarts):
        shutil.rmtree(journal_folder(folder, number + 1), ignore_errors=True)


def journal_folder(folder: Path, num_restarts: int) -> Path:
    """Where the ranks of a run that was restarted so often keep their records."""
    return folder / RESTART_FOLDER.format(num_restarts) if num_restarts else folder


def read_records(
    folder: Path,
    collector: Collector,
    *,
    restarts: Sequence[tuple[int, float]] = (),
    is_growing: bool,
) -> None:
    """Add to `collector` what the folder has and it has not.

    `restarts` are step and seconds of those that there were. `is_growing` leaves out,
    for now, what a rank has yet to fill in.
    """
    for step, seconds in restarts[collector.num_restarts :]:
        for rank in collector.ranks:
            read_journal(folder, rank, collector)
        collector.restart(step, seconds)
    for rank in collector.ranks:
        read_journal(folder, rank, collector, is_growing=is_growing)
    # Looked for last: a table that appears in between has taken the journals' place.
    if (folder / TABLE_FILE).exists():
        _read_table(folder / TABLE_FILE, collector)


def _read_table(path: Path, collector: Collector) -> None:
    from pyarrow import parquet

    if not path.is_file():
        raise ValueError(f"{path} is no file")
    table = parquet.read_table(path, read_dictionary=["metric"]).combine_chunks()
    types = {name: str(table.schema.field(name).type) for name in _TYPES}
    holes = [name for name in _TYPES if table[name].null_count]
    if types != _TYPES or holes:
        raise ValueError(f"{path} has the columns {types}, with holes in {holes}")
    ranks = table["rank"].to_numpy()
    metrics = table["metric"].combine_chunks()
    ids = metrics.indices.to_numpy() if len(table) else np.empty(0, "i4")
    names = metrics.dictionary.to_pylist() if len(table) else []
    records = np.empty(len(table), RECORD)
    for name in ("step", "seconds", "memory_bytes", "value"):
        records[name] = table[name].to_numpy()
    collector.reset()
    for rank in collector.ranks:
        mine = ranks == rank
        own = records[mine]
        # Its metrics, by when they came first.
        found, first, places = np.unique(
            ids[mine], return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        rank_of = np.empty(len(order), "u2")
        rank_of[order] = np.arange(len(order), dtype="u2")
        own["metric"] = rank_of[places]
        collector.add(rank, Batch(0, [names[found[i]] for i in order], own))


def read_journal(
    folder: Path, rank: int, collector: Collector, *, is_growing: bool = False
) -> None:
    """Add what a rank's journal has and `collector` has not; nothing where it has none.

    It is the one since the last restart that `collector` knows of. If records were lost
    in between, all of it is read again.
    """
    folder = journal_folder(folder, collector.num_restarts)
    begin = 0 if collector.lost[rank] else collector.num_received[rank]
    try:
        path = folder / RECORDS_FILE.format(rank)
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(begin * RECORD.itemsize)
            content = file.read()
        # Read after the records, so that it has the names of all of them.
        names = _read_names(folder / NAMES_FILE.format(rank))
    except OSError:
        return
    whole = len(content) // RECORD.itemsize
    records = np.frombuffer(content, RECORD, whole)
    records = records[: _num_written(records, len(names), is_growing=is_growing)]
    if begin == 0 and len(records) < collector.num_new(rank):
        return  # it knows more than its journal
    if begin == 0:
        collector.start_over(rank)
    if len(records):
        collector.add(rank, Batch(begin, names, records))


def _num_written(records: np.ndarray, num_names: int, *, is_growing: bool) -> int:
    """How many records, from the first, are whole."""
    ends = (records["metric"] == 0) | (records["metric"] >= num_names)
    ends |= ~np.isfinite(records["seconds"])
    if is_growing:
        ends |= np.ascontiguousarray(records["value"]).view("u8") == _UNREAD_BITS
    return int(ends.argmax()) if ends.any() else len(records)


def _read_names(path: Path) -> list[str]:
    """The metrics by id, up to the first line that is not whole."""
    names = [UNWRITTEN]
    if not path.is_file():
        return names
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            number, name = json.loads(line)
        except (ValueError, TypeError):
            break
        is_next = number == len(names) or number == len(names) - 1 > 0
        if not (line.endswith(b"\n") and is_next and isinstance(name, str)):
            break
        names[number:] = [name]
    return names
