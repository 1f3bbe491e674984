"""A run's folder on disk: `run.json`, `records.parquet` and the ranks' journals."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from typing import BinaryIO

import numpy as np

from labkit.checks import check_metric
from labkit.checks import is_int
from labkit.checks import is_number
from labkit.checks import is_run_name
from labkit.checks import short_repr
from labkit.control_groups import memory_available
from labkit.json_files import MAX_JSON_BYTES
from labkit.json_files import read_json
from labkit.notebook.history.collector import Collector
from labkit.notebook.history.curves import are_finite
from labkit.records import MAX_METRICS
from labkit.records import MAX_RANKS
from labkit.records import NAMES_FILE
from labkit.records import RECORD
from labkit.records import RECORDS_FILE
from labkit.records import RESTART_FOLDER
from labkit.records import UNREAD
from labkit.records import UNWRITTEN
from labkit.records import Batch
from labkit.records import format_bytes

INFO_FILE = "run.json"
TABLE_FILE = "records.parquet"

MAX_RESTARTED = 2**16
"""Restarts of a run on disk, times its ranks."""
BLOCK_RECORDS = 2**16
"""So many are read at once."""
_BUFFER_BYTES = 2**16
MIN_ROWS = 2**22
MAX_ROWS_PER_BYTE = 16
"""Of a table with more than `MIN_ROWS`. Each call of `log` leaves a time of its own:
one of 100 metrics that never change has 5."""
MAX_NAMES_BYTES = 2**23
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
    if len(text) > MAX_JSON_BYTES:  # which nobody could read
        room = format_bytes(MAX_JSON_BYTES)
        raise OSError(f"{format_bytes(len(text))} of {INFO_FILE}, room for {room}")
    _replace(folder / INFO_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def read_info(folder: Path) -> dict[str, Any]:
    """What `write_info` wrote. OSError or ValueError where that is not there.

    What identifies a run is checked; the rest is when the run is opened.
    """
    path = folder / INFO_FILE
    info = read_json(path)
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
        RuntimeError,  # pyarrow has some that are one
        TypeError,
        ValueError,
    ) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        what = f"it has no {error}" if type(error) is KeyError else f"{kind}{error}"
        raise ValueError(
            f"{folder} has no run that can be read: {what}; load another one"
        ) from error


def is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value < _LATEST


def are_ranks(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= MAX_RANKS
        and all(is_int(rank) and 0 <= rank < MAX_RANKS for rank in value)
        and len(value) == len(set(value))
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

    _replace(folder / TABLE_FILE, lambda path: _write_table(path, collector))
    pa.default_memory_pool().release_unused()  # it would keep as much as the table
    if collector.num_lost:
        return
    for rank in collector.ranks:
        for name in (RECORDS_FILE, NAMES_FILE):
            (folder / name.format(rank)).unlink(missing_ok=True)
    for number in range(collector.num_restarts):
        shutil.rmtree(journal_folder(folder, number + 1), ignore_errors=True)


def _write_table(path: Path, collector: Collector) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    of_ranks = {rank: collector.metrics(rank) for rank in collector.ranks}
    ids = {name: at for at, name in enumerate(dict.fromkeys(chain(*of_ranks.values())))}
    names = pa.array([*ids], pa.string())
    schema = pa.schema(
        [
            ("rank", pa.int32()),
            ("metric", pa.dictionary(pa.int32(), pa.string())),
            ("step", pa.int64()),
            ("seconds", pa.float64()),
            ("memory_bytes", pa.int64()),
            ("value", pa.float64()),
        ]
    )
    # In blocks: a table of all records would take their memory once more.
    with parquet.ParquetWriter(path, schema) as writer:
        for rank, own in of_ranks.items():
            own_ids = np.array([ids[name] for name in own], "i4")
            records = collector.records(rank)
            for begin in range(0, len(records), BLOCK_RECORDS):
                block = records[begin : begin + BLOCK_RECORDS]
                metrics = pa.array(own_ids[block["metric"]])
                columns = [
                    pa.array(np.full(len(block), rank, "i4")),
                    pa.DictionaryArray.from_arrays(metrics, names),
                ]
                for name in ("step", "seconds", "memory_bytes", "value"):
                    columns.append(pa.array(np.ascontiguousarray(block[name])))
                batch = pa.RecordBatch.from_arrays(columns, schema=schema)
                writer.write_batch(batch)


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
    if not (folder / TABLE_FILE).exists():
        for step, seconds in restarts[collector.num_restarts :]:
            for rank in collector.ranks:
                read_journal(folder, rank, collector)
            collector.restart(step, seconds)
        for rank in collector.ranks:
            read_journal(folder, rank, collector, is_growing=is_growing)
    # Also of a table that appeared in between, which has taken the journals' place.
    if (folder / TABLE_FILE).exists():
        _read_table(folder / TABLE_FILE, collector)


def _read_table(path: Path, collector: Collector) -> None:
    """In blocks, each of them checked: a file of 1 MiB may hold 40 million rows."""
    import pyarrow as pa
    from pyarrow import parquet

    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    # By default all of the file would be read ahead, and kept.
    with parquet.ParquetFile(
        path, read_dictionary=["metric"], buffer_size=_BUFFER_BYTES, pre_buffer=False
    ) as file:
        types = {each.name: str(each.type) for each in file.schema_arrow}
        if {name: types.get(name) for name in _TYPES} != _TYPES:
            raise ValueError(f"{path} has the columns {short_repr(types)}")
        groups = [
            file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)
        ]
        num_rows = sum(group.num_rows for group in groups)
        if num_rows > max(MIN_ROWS, MAX_ROWS_PER_BYTE * path.stat().st_size):
            raise ValueError(
                f"{path} has {path.stat().st_size:,} bytes and {num_rows:,} records, "
                "which labkit does not write"
            )
        check_room(path, num_rows)
        collector.reset()
        names: dict[int, list[str]] = {}
        blocks = file.iter_batches(BLOCK_RECORDS, columns=[*_TYPES], use_threads=False)
        for block in blocks:
            _take_block(path, block, collector, names)
    pa.default_memory_pool().release_unused()  # it would keep as much as the table


def _take_block(
    path: Path, block: Any, collector: Collector, names: dict[int, list[str]]
) -> None:
    """Add a block of a table; `names` are those of each rank's metrics until now."""
    if any(column.null_count for column in block.columns):
        raise ValueError(f"{path} has rows without a value")
    block.validate(full=True)
    ranks = block.column("rank").to_numpy()
    metrics = block.column("metric")
    ids = metrics.indices.to_numpy()
    records = np.empty(len(ids), RECORD)
    for name in ("step", "seconds", "memory_bytes", "value"):
        records[name] = block.column(name).to_numpy()
    if not are_records(records).all():
        raise ValueError(f"{path} has times that are none")
    if (np.diff(ranks) < 0).any() or ranks[0] < max(names, default=0):
        raise ValueError(f"{path} is not in the order of ranks")
    for rank in np.unique(ranks).tolist():
        if rank not in collector.num_records:
            continue
        mine = slice(*np.searchsorted(ranks, [rank, rank + 1]))
        own, known = records[mine], names.setdefault(rank, [])
        # Its metrics, by when they came first.
        found, first, places = np.unique(
            ids[mine], return_index=True, return_inverse=True
        )
        words = metrics.dictionary.take(found).to_pylist()
        for place in np.argsort(first).tolist():
            if words[place] not in known:
                check_metric(words[place])
                known.append(words[place])
        if len(known) > MAX_METRICS:
            raise ValueError(f"{path} has more than {MAX_METRICS:,} metrics of a rank")
        own["metric"] = np.array([known.index(word) for word in words], "u2")[places]
        collector.add(rank, Batch(collector.num_received[rank], [*known], own))


def read_journal(
    folder: Path, rank: int, collector: Collector, *, is_growing: bool = False
) -> None:
    """Add what a rank's journal has and `collector` has not; nothing where it has none.

    It is the one since the last restart that `collector` knows of. If records were lost
    in between, all of it is read again.
    """
    folder = journal_folder(folder, collector.num_restarts)
    begin = 0 if collector.lost[rank] else collector.num_received[rank]
    path = folder / RECORDS_FILE.format(rank)
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            blocks = _read_blocks(path, file, begin)
        # Read after the records, so that it has the names of all of them.
        names = _read_names(folder / NAMES_FILE.format(rank))
    except OSError:
        return
    for number, block in enumerate(blocks):
        num_written = _num_written(block, len(names), is_growing=is_growing)
        if num_written < len(block):
            blocks[number:] = [block[:num_written]]
    if begin == 0 and sum(map(len, blocks)) < collector.num_new(rank):
        return  # it knows more than its journal
    if begin == 0:
        collector.start_over(rank)
    for block in blocks:
        if len(block):
            collector.add(rank, Batch(begin, names, block))
            begin += len(block)


def _read_blocks(path: Path, file: BinaryIO, begin: int) -> list[np.ndarray]:
    """A file's records from the one with this number on, up to where nothing was
    written: a file may have a hole of any size."""
    size, num_records = RECORD.itemsize, 0
    blocks = []
    file.seek(begin * size)
    while content := file.read(BLOCK_RECORDS * size):
        block = np.frombuffer(content, RECORD, len(content) // size)
        num_records += len(block)
        if num_records > MIN_ROWS:
            check_room(path, num_records)
        blocks.append(block)
        if not len(block) or not block["metric"][-1]:
            break
    return blocks


def check_room(path: Path, num_records: int) -> None:
    """ValueError unless memory has room for so many records, and the tables of them."""
    needed = 4 * num_records * RECORD.itemsize
    free = memory_available()
    if needed > free:
        raise ValueError(
            f"{path} has {num_records:,} records, which take {format_bytes(needed)} "
            f"of memory, and {format_bytes(free)} are free"
        )


def are_records(records: np.ndarray) -> np.ndarray:
    """Which of them have a time to reckon with."""
    return are_finite(records["seconds"])


def _num_written(records: np.ndarray, num_names: int, *, is_growing: bool) -> int:
    """How many records, from the first, are whole."""
    ends = (records["metric"] == 0) | (records["metric"] >= num_names)
    ends |= ~are_records(records)
    if is_growing:
        ends |= np.ascontiguousarray(records["value"]).view("u8") == _UNREAD_BITS
    return int(ends.argmax()) if ends.any() else len(records)


def _read_names(path: Path) -> list[str]:
    """The metrics by id, up to the first line that is not whole."""
    names = [UNWRITTEN]
    if not path.is_file():
        return names
    with path.open("rb") as file:
        content = file.read(MAX_NAMES_BYTES)
    for line in content.splitlines(keepends=True):
        try:
            number, name = json.loads(line)
            check_metric(name)
        except (ValueError, TypeError, RecursionError):
            break
        is_next = number == len(names) or number == len(names) - 1 > 0
        if not (line.endswith(b"\n") and is_int(number) and is_next):
            break
        names[number:] = [name]
    return names[: MAX_METRICS + 1]
