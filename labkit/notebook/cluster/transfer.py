"""Copies variables between the notebook and ranks, of any size."""

import contextlib
import shutil
import sys
import uuid
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from labkit import serialization
from labkit.checks import UserError
from labkit.rank_spec import format_ranks
from labkit.serialization import Pickled

if TYPE_CHECKING:
    from labkit.notebook.cluster.engines import LabEngines
    from labkit.notebook.cluster.rank_group import LabRanks

_TRANSFER = "labkit.rank.engine.transfer"

Payload = bytes | bytearray | memoryview

FILE_BYTES = 2**17
"""What is larger goes by way of a file: the controller decrypts, copies and encrypts
all that it carries, once for each rank."""
MEMORY_BYTES = 2**28
"""Up to this the file is in memory; of what is larger memory may have no second copy,
and it is in the lab's folder."""
PART_BYTES = 2**26
"""What is larger has a bar that shows how far it is. What the disk has no room for goes
through the controller in parts of this size."""


def push_sources(
    cluster: "LabEngines", sources: Mapping[str, Any], ranks: Sequence[int]
) -> None:
    """Have the notebook's cells on `ranks`, for tracebacks through functions of it."""
    cluster.call("labkit.rank.engine.rpc:receive_sources", dict(sources), ranks=ranks)


def push(cluster: "LabEngines", payload: Pickled, ranks: Sequence[int]) -> None:
    """Put pickled names and values into the namespaces of `ranks`."""
    # To unpickle may take as long as it likes: what is pushed may run code.
    call = partial(cluster.call, ranks=ranks, timeout_s=None)
    if len(payload) <= FILE_BYTES:
        call(f"{_TRANSFER}:push", bytes(payload))
        return
    with contextlib.ExitStack() as files:
        path = None
        if cluster.is_local:
            path = files.enter_context(_file_with(cluster, payload))
        if path is not None and all(call(f"{_TRANSFER}:push_file", str(path))):
            return
    with _in_parts(cluster, "push", len(payload), ranks) as progress:
        whole = memoryview(bytes(payload))
        for start in range(0, len(whole), PART_BYTES):
            part = bytes(whole[start : start + PART_BYTES])
            call(f"{_TRANSFER}:push_part", part, start == 0)
            progress.update(len(part))
        call(f"{_TRANSFER}:push_parts")


def pull(
    group: "LabRanks", name: str, ranks: Sequence[int], *, full: bool
) -> list[Payload]:
    """The pickled variable of each of `ranks`, for whoever is `working` with the group.

    With `full` it is gathered where it is sharded, which takes all ranks. NameError
    where one of `ranks` has no such variable.
    """
    cluster = group.cluster
    is_collective = full and _is_sharded(group, name, ranks)
    file = cluster.folder / f"pull-{uuid.uuid4().hex}"
    begin = partial(cluster.call, f"{_TRANSFER}:pull", name, full, list(ranks))
    # A file of another host's has a name here too, and is another file.
    file_bytes = FILE_BYTES if cluster.is_local else sys.maxsize
    sizes = (file_bytes, MEMORY_BYTES, PART_BYTES)
    begin = partial(begin, str(file), *sizes, timeout_s=None)
    try:
        if is_collective:
            with group.risking_the_group():
                answers = begin(ranks=group.everyone, is_collective=True)
            begun = [answers[rank] for rank in ranks]
        else:
            begun = begin(ranks=ranks)
        _check_found(name, ranks, [answer is not None for answer in begun])
        found = _payloads(cluster, [(size, first) for size, first, _ in begun], ranks)
    except BaseException:
        _drop_parts(cluster, ranks)  # of those that could pickle theirs
        raise
    finally:
        # Of ranks that have died, too.
        for path in cluster.folder.glob(f"{file.name}-*"):
            path.unlink(missing_ok=True)
    if parts := [
        rank for rank, (*_, is_part) in zip(ranks, begun, strict=True) if is_part
    ]:
        print(
            f"labkit: {name} is sharded, and what was copied is the part of "
            f"{format_ranks(parts)} alone; --full gathers it whole",
            file=sys.stderr,
        )
    return found


def _payloads(
    cluster: "LabEngines",
    begun: Sequence[tuple[int, bytes | str]],
    ranks: Sequence[int],
) -> list[Payload]:
    """What each rank has begun to send: its length, and the file with all of it or its
    first part."""
    total = sum(num_bytes for num_bytes, _ in begun)
    first_parts = [first for _, first in begun if isinstance(first, bytes)]
    if total == sum(map(len, first_parts)):
        return [*first_parts]
    found: list[Payload] = []
    with _in_parts(cluster, "pull", total, ranks) as progress:
        for rank, (num_bytes, first) in zip(ranks, begun, strict=True):
            if isinstance(first, str):
                try:
                    found.append(serialization.mapped(Path(first)))
                except OSError:  # another process's memory may be out of bounds
                    first = b""
                else:
                    progress.update(num_bytes)
                    continue
            payload = bytearray(first)
            progress.update(len(first))
            while len(payload) < num_bytes:
                [part] = cluster.call(
                    f"{_TRANSFER}:pull_part",
                    *(len(payload), PART_BYTES),
                    ranks=[rank],
                    timeout_s=None,
                )
                payload += part
                progress.update(len(part))
            found.append(payload)
    return found


def _check_found(name: str, ranks: Sequence[int], found: Sequence[bool]) -> None:
    if without := [
        rank for rank, is_there in zip(ranks, found, strict=True) if not is_there
    ]:
        raise NameError(
            f"{format_ranks(without)}: no variable {name!r}; a cell that "
            "begins with %%dist sets one"
        )


def forecast(cluster: "LabEngines", model: str, x: str | None, *given: Any) -> Any:
    """What `labkit.estimate.forecast` gives on rank 0, of its variables of these names,
    `given` an optimizer and options. NameError where it has none of such a name."""
    names = [model] if x is None else [model, x]
    [missing] = cluster.call(f"{_TRANSFER}:missing", names, ranks=[0])
    if missing:
        raise NameError(
            f"neither the notebook nor rank 0 has a variable {missing[0]!r}; make it "
            "in a cell, without a magic or with %%dist"
        )
    place = f"{_TRANSFER}:forecast_variable"
    [payload] = cluster.call(place, model, x, *given, ranks=[0], timeout_s=None)
    return serialization.loads(payload)


def _is_sharded(group: "LabRanks", name: str, ranks: Sequence[int]) -> bool:
    """Whether one of `ranks` has but a shard, so that to gather it is collective.

    NameError where one of them has nothing, and UserError where not all ranks have a
    shard.
    """
    everyone = group.everyone
    missing = group.cluster.call(f"{_TRANSFER}:missing", [name], ranks=everyone)
    having = [rank for rank, no in zip(everyone, missing, strict=True) if not no]
    _check_found(name, ranks, [rank in having for rank in ranks])
    found = group.cluster.call(f"{_TRANSFER}:is_sharded", name, ranks=having)
    parts = [rank for rank, is_part in zip(having, found, strict=True) if is_part]
    if not set(parts) & set(ranks):
        return False
    if others := set(group.everyone) - set(parts):
        raise UserError(
            f"{name!r} is sharded on {format_ranks(parts)} and not on "
            f"{format_ranks(others)}, so it cannot be gathered; it is of an earlier "
            "run, and replaced there since. Make it again on all ranks"
        )
    return True


@contextlib.contextmanager
def _file_with(cluster: "LabEngines", payload: Pickled) -> Iterator[Path | None]:
    """A file from which ranks can read it; None where there is no room for it."""
    if len(payload) <= MEMORY_BYTES:
        try:
            file = serialization.MemoryFile(payload)
        except OSError:
            pass  # but the disk may have it
        else:
            with contextlib.closing(file):
                yield file.path
            return
    path = cluster.folder / f"push-{uuid.uuid4().hex}"
    try:
        yield path if _is_written(path, payload) else None
    finally:
        path.unlink(missing_ok=True)


def _is_written(path: Path, payload: Pickled) -> bool:
    """Whether the disk has room for it; what others need there is not filled up."""
    try:
        if shutil.disk_usage(path.parent).free < 2 * len(payload):
            return False
        with _bar("push", len(payload)) as progress:
            payload.write_to(path, progress.update)
    except OSError:
        path.unlink(missing_ok=True)
        return False
    return True


def _bar(what: str, num_bytes: int) -> Any:
    from tqdm import tqdm

    is_quick = num_bytes <= PART_BYTES
    return tqdm(desc=what, total=num_bytes, unit="B", unit_scale=True, disable=is_quick)


@contextlib.contextmanager
def _in_parts(
    cluster: "LabEngines", what: str, num_bytes: int, ranks: Sequence[int]
) -> Iterator[Any]:
    """A bar for what takes long; ranks keep no part when it ends, in whatever way."""
    try:
        with _bar(what, num_bytes) as progress:
            yield progress
    finally:
        _drop_parts(cluster, ranks)


def _drop_parts(cluster: "LabEngines", ranks: Sequence[int]) -> None:
    for rank in ranks:  # each by itself: another may have died
        with contextlib.suppress(RuntimeError):
            cluster.begin(f"{_TRANSFER}:drop_parts", ranks=[rank])
