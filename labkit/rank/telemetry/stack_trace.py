"""Where this rank's main thread is, as another thread of it sees."""

import contextlib
import faulthandler
import json
import linecache
import math
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from labkit import timeouts
from labkit.compat.c10d import flight_records
from labkit.compat.c10d import names_of_groups
from labkit.compat.c10d import num_started
from labkit.compat.c10d import ranks_of
from labkit.records import COMPARISON
from labkit.records import DUMP_SIGNAL
from labkit.records import Call
from labkit.records import Frame
from labkit.records import Position
from labkit.strategies.mesh import links
from labkit.strategies.mesh.links import name_of
from labkit.strategies.mesh.links import num_begun
from labkit.strategies.mesh.links import waiting

_BUSY = 0.2
"""Of the time looked at; one that waits for a collective uses next to none."""

_TORCH_DISTRIBUTED = str(Path(c10d.__file__).parent)
_TORCH = str(Path(torch.__file__).parent) + os.sep
_TORCH_DATA = str(Path(_TORCH, "utils", "data"))
_OURS = "labkit-"
"""What the names of labkit's own threads begin with, which call no collectives."""
_LABKIT = str(Path(__file__).parents[2])
_COMPAT = str(Path(_LABKIT, "compat")) + os.sep
_STORE = str(Path(_LABKIT, "rank", "group", "store.py"))
_LIBRARIES = [
    *{sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")},
    str(Path(_LABKIT).parent),
]
_DTYPES = {"Byte": torch.uint8, "Char": torch.int8}


def dump_on_signal(path: str) -> None:
    """Write the main thread's Python stack into `path` at `DUMP_SIGNAL`.

    Python's own handler, in C: it also works where native code holds the GIL, and no
    thread of this process can answer.
    """
    # Never closed: it is written to as long as this process lives.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    faulthandler.register(signal.Signals[DUMP_SIGNAL], file, all_threads=False)


def position(
    rank: int,
    cells: Mapping[str, int],
    *,
    is_running: bool,
    since_ns: int,
    waits_on_device: bool,
) -> Position:
    """Where the main thread is; called in another one.

    `cells` has the number of the notebook's cell by file name. A collective counts as
    waited for if it was begun after `since_ns` (of `time.time_ns`), has not ended, and
    the main thread does not compute meanwhile; `waits_on_device` where it is the GPU
    that waits, and a main thread in wait for that spins.
    """
    load = _load()
    stacks = sys._current_frames()
    main = threading.main_thread()
    frame = _outside_store(stacks.pop(main.ident or 0))
    call = None
    is_busy = load > _BUSY
    if waits_on_device or not is_busy:
        call = _oldest_call(since_ns) or _call_in(frame)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = {}
    is_alone = (waits_on_device and is_busy) or _may_wait_for_ranks(frame)
    for ident, other in stacks.items():
        name = names.get(ident, "")  # none: autograd's, which acts for the main one
        frames = _frames(other, cells)
        is_users = any(each.is_users for each in frames)
        if is_users:
            others[name or str(ident)] = frames
        if name.startswith(_OURS):
            continue
        is_alone &= not (name and _is_in_collective(other))
        is_alone &= not is_users or _waits_for_thread(other)
    return Position(
        rank=rank,
        is_running=is_running,
        frames=_frames(frame, cells),
        call=call,
        is_busy=is_busy,
        started={**started_collectives(), **newest_numbers(since_ns)},
        others=others,
        is_alone=is_alone,
    )


def finished_collectives() -> str:
    """What changes whenever a collective begins or ends in any group."""
    return "".join(flight_records(False)) + str(started_collectives())


def started_collectives() -> dict[str, int]:
    """How many collectives this rank has started in each group, by its name, and how
    many comparisons with the other ranks."""
    found: dict[str, int] = {}
    for group, name in names_of_groups().items():
        if isinstance(group, torch.distributed.ProcessGroup):
            # RuntimeError: it has none yet, or is being destroyed.
            found[name] = 0
            with contextlib.suppress(RuntimeError):
                found[name] = num_started(group)
    return found | num_begun()


def newest_numbers(since_ns: int) -> dict[str, int]:
    """The number of the newest collective in each group, by its name, as far as torch
    keeps it: `started_collectives` counts what gloo's ranks have sent to one another,
    and the number of a `Call` does not."""
    found: dict[str, int] = {}
    for record in flight_records(True, False):
        for entry in json.loads(record).get("entries", []):
            name, _ = entry["process_group"]
            if not entry["is_p2p"] and entry["time_created_ns"] >= since_ns:
                found[name] = max(found.get(name, 0), entry["collective_seq_id"])
    return found


# ---- frames ----


def _frames(innermost: FrameType, cells: Mapping[str, int]) -> list[Frame]:
    """The stack from the notebook's cell inwards, the innermost frame last."""
    walked = list(traceback.walk_stack(innermost))[::-1]
    files = [frame.f_code.co_filename for frame, _ in walked]
    first = next((at for at, file in enumerate(files) if file in cells), 0)
    summary = traceback.StackSummary.extract(iter(walked[first:]))
    return [
        Frame(
            place=_place(each.filename, each.lineno or 0, cells),
            function=each.name,
            source=each.line or "",
            is_users=each.filename in cells or not _is_library(each.filename),
        )
        for each in summary
    ]


def _is_in_collective(innermost: FrameType) -> bool:
    files = (each.f_code.co_filename for each in _callers(innermost))
    return any(each.startswith(_TORCH_DISTRIBUTED) for each in files)


def _may_wait_for_ranks(innermost: FrameType) -> bool:
    """Whether it can be in a collective that is under way, and not where the loop does
    other things meanwhile: it sleeps, reads a file, waits for a worker."""
    file = innermost.f_code.co_filename
    if file.startswith(_TORCH):
        return not file.startswith(_TORCH_DATA)
    if file == links.__file__:
        return True
    if file.startswith(_COMPAT):  # torch's own, in C++: DDP rebuilds its buckets
        return True
    # As work.wait(), which has no frame.
    line = linecache.getline(file, innermost.f_lineno)
    return re.search(r"\bwait\b", line) is not None


def _waits_for_thread(innermost: FrameType) -> bool:
    """Whether it waits without a limit for another thread, as at a full queue."""
    is_waiting = innermost.f_code is threading.Condition.wait.__code__
    return is_waiting and innermost.f_locals["timeout"] is None


def _outside_store(innermost: FrameType) -> FrameType:
    """The frame that waits in the group's store, of which torch has none of its own."""
    of_store = [f for f in _callers(innermost) if f.f_code.co_filename == _STORE]
    return (of_store[-1].f_back if of_store else None) or innermost


def _place(file: str, line: int, cells: Mapping[str, int]) -> str:
    """A file and a line, as tracebacks in the notebook name them."""
    if file in cells:
        return f"Cell In[{cells[file]}], line {line}"
    roots = [*_LIBRARIES]
    with contextlib.suppress(FileNotFoundError):  # it may have been deleted
        roots.append(str(Path.cwd()))
    inside = [root for root in roots if file.startswith(root + "/")]
    shown = file[len(max(inside, key=len)) + 1 :] if inside else file
    return f"{shown}:{line}"


def _is_library(file: str) -> bool:
    return file.startswith(("<", _LABKIT, *_LIBRARIES[:-1]))


def _load() -> float:
    """The share of a core that the main thread uses, about now."""
    ident = threading.main_thread().ident
    if not hasattr(time, "pthread_getcpuclockid") or ident is None:
        return 0.0  # not available on macOS
    clock = time.pthread_getcpuclockid(ident)
    began, used = time.monotonic(), time.clock_gettime(clock)
    time.sleep(timeouts.LOAD_S)
    return (time.clock_gettime(clock) - used) / (time.monotonic() - began)


# ---- collectives ----


def _oldest_call(since_ns: int) -> Call | None:
    """What this rank waits in, since longest: a collective, or a comparison."""
    calls = [recorded_call(since_ns), comparison()]
    found = [call for call in calls if call is not None]
    return min(found, key=lambda call: call.began_ns, default=None)


def comparison() -> Call | None:
    """The comparison of labkit's with other ranks that this one waits in."""
    found = waiting()
    if found is None:
        return None
    is_apart, number = found.waits_for
    are_all = len(found.ranks) == dist.get_world_size()
    return Call(
        kind=COMPARISON,
        number=number,
        group=name_of(found, apart=is_apart),
        ranks=None if are_all else found.ranks,
        began_ns=found.waits_since_ns,
    )


def recorded_call(since_ns: int) -> Call | None:
    """The oldest collective under way, as torch's Flight Recorders have it.

    They see those of DDP's reducer, FSDP and DeepSpeed too, in which the main thread
    has no frame. Over gloo they do not see `send` and `recv`.
    """
    entry = oldest_under_way(map(json.loads, flight_records(True, False)), since_ns)
    if entry is None:
        return None
    name, _ = entry["process_group"]
    kind = entry["profiling_name"].split(":", 1)[-1]
    return Call(
        kind=kind.removeprefix("_").removesuffix("_base"),
        number=None if entry["is_p2p"] else entry["collective_seq_id"],
        num_bytes=max(
            _num_bytes(entry["input_sizes"], entry["input_dtypes"]),
            _num_bytes(entry["output_sizes"], entry["output_dtypes"]),
        ),
        group=name,
        ranks=_ranks_of(name),
        began_ns=entry["time_created_ns"],
    )


def oldest_under_way(
    records: Iterable[Mapping[str, Any]], since_ns: int
) -> dict[str, Any] | None:
    """The oldest entry of these records that has not ended.

    NCCL's never says of the parts of a `batch_isend_irecv` that they have: the entry
    that closes the batch, with the same numbers, says it of all.
    """
    entries = [entry for record in records for entry in record.get("entries", [])]
    ended = {
        _batch_of(entry)
        for entry in entries
        if entry["profiling_name"].endswith(":coalesced")
        and (entry["retired"] or entry["state"] == "completed")
    }
    under_way = [
        entry
        for entry in entries
        if not entry["retired"]
        and entry["state"] != "completed"
        and entry["time_created_ns"] >= since_ns
        and not (entry["is_p2p"] and _batch_of(entry) in ended)
    ]
    return min(under_way, key=lambda entry: entry["time_created_ns"], default=None)


def _batch_of(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    group, _ = entry["process_group"]
    return group, entry["collective_seq_id"], entry["p2p_seq_id"]


def _call_in(innermost: FrameType) -> Call | None:
    """The call of torch.distributed that a frame is in: `recv`, `new_group`, ..."""
    outermost = None
    for frame in _callers(innermost):
        if not frame.f_code.co_filename.startswith(_TORCH_DISTRIBUTED):
            break
        if frame.f_code.co_filename == c10d.__file__:
            outermost = frame
    if outermost is None:
        return None
    names = outermost.f_locals
    tensor = names.get("tensor")
    kind = outermost.f_code.co_name
    if kind == "recv":
        source = names.get("src")
        kind += " from any rank" if source is None else f" from rank {source}"
    elif kind == "send":
        kind += f" to rank {names.get('dst')}"
    return Call(
        kind=kind,
        num_bytes=tensor.nbytes if isinstance(tensor, torch.Tensor) else 0,
    )


def is_called_from(prefix: str, *, but: CodeType | None = None) -> bool:
    """Whether a module whose name begins so is on the stack, with other code than
    `but`."""
    frames = (each for each in _callers(sys._getframe(1)) if each.f_code is not but)
    return any(str(f.f_globals.get("__name__")).startswith(prefix) for f in frames)


def _callers(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def _num_bytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    total = 0
    for shape, name in zip(sizes, dtypes, strict=False):
        dtype: Any = _DTYPES.get(name) or getattr(torch, name.lower(), None)
        total += math.prod(shape) * (dtype.itemsize if dtype is not None else 0)
    return total


def _ranks_of(name: str) -> list[int] | None:
    """The ranks of a group, by its name; None for the default group."""
    for group, its_name in names_of_groups().items():
        if its_name == name and group is not c10d.GroupMember.WORLD:
            return ranks_of(group)
    return None
