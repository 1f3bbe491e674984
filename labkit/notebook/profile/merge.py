"""Brings the traces of all ranks to one clock, and into one file."""

import gzip
import json
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.notebook.profile.parts import matched
from labkit.notebook.profile.trace import Trace
from labkit.notebook.profile.trace import read_json

SYMMETRIC = ("all_reduce", "allreduce", "all_gather", "allgather", "barrier")
"""None of these ends on a rank before the last one has come to it."""
LANES_PER_RANK = 100
_LEVEL = 3
"""Of gzip: a file half as large would take four times as long."""


def measure_offsets(traces: Sequence[Trace]) -> None:
    """Find by how much each clock is ahead of the first rank's, and how surely.

    A collective is a pair of messages: it ends on none of two ranks before the other
    has begun it. So its times say how much the other's clock is ahead at most, and at
    least; all of them together say it best. Where no difference is possible, there is
    none: ranks of one host read one clock.
    """
    first = traces[0]
    for trace in traces[1:]:
        low, high = float("-inf"), float("inf")
        for together in matched([first, trace]):
            ours, theirs = together[first.rank], together[trace.rank]
            if ours.kind.startswith(SYMMETRIC):
                high = min(high, theirs.ended - ours.began)
                low = max(low, theirs.began - ours.ended)
        if low > high or high == float("inf"):
            trace.offset, trace.offset_error = 0.0, float("nan")
            continue
        trace.offset = 0.0 if low <= 0 <= high else (low + high) / 2
        trace.offset_error = (high - low) / 2


def to_one_clock(traces: Sequence[Trace]) -> None:
    """Measure the clocks, and have all times be those of the first rank's."""
    measure_offsets(traces)
    for trace in traces:
        by = trace.offset
        if not by:
            continue
        trace.steps = [
            s._replace(began=s.began - by, ended=s.ended - by) for s in trace.steps
        ]
        trace.events = [
            e._replace(began=e.began - by, ended=e.ended - by) for e in trace.events
        ]
        trace.messages = [
            m._replace(began=m.began - by, ended=m.ended - by) for m in trace.messages
        ]
        trace.memory = [(moment - by, a, r) for moment, a, r in trace.memory]


def write_merged(paths: Mapping[int, Path], traces: Sequence[Trace], to: Path) -> None:
    """Write the files of these ranks as one trace, a lane for each."""
    base: int | None = None
    temporary = to.with_name(f"{to.name}.tmp")
    with gzip.open(temporary, "wt", compresslevel=_LEVEL, encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for trace in traces:
            content = read_json(paths[trace.rank])
            own = int(content.get("baseTimeNanoseconds", 0))
            base = own if base is None else base
            later = (own - base) / 1e3 - trace.offset
            for each in lanes_of(content, trace.rank, later):
                file.write(separator + json.dumps(each, separators=(",", ":")))
                separator = ",\n"
        file.write(f'\n], "baseTimeNanoseconds": {base or 0}}}\n')
    temporary.replace(to)


def lanes_of(
    content: Mapping[str, Any], rank: int, later: float
) -> list[dict[str, Any]]:
    """The events of a rank in lanes of its own, `later` by so many microseconds."""
    device = content["labkit"]["device"]
    events = [e for e in content["traceEvents"] if e.get("ph") != "M"]
    processes = sorted({e["pid"] for e in events if isinstance(e.get("pid"), int)})
    # That of Python has an id, as every process; those of GPUs are their numbers.
    lanes = {
        pid: rank * LANES_PER_RANK + place
        for place, pid in enumerate(sorted(processes, reverse=True))
    }
    found: list[dict[str, Any]] = []
    for place, (pid, lane) in enumerate(lanes.items()):
        name = f"rank {rank} ({device})" if not place else f"rank {rank}, GPU {pid}"
        for key, value in (("name", name), ("sort_index", lane)):
            found.append(
                {
                    "ph": "M",
                    "name": f"process_{key}",
                    "pid": lane,
                    "tid": 0,
                    "args": {key: value},
                }
            )
    for each in content["traceEvents"]:
        pid = each.get("pid")
        if not isinstance(pid, int) or pid not in lanes:
            continue
        if each.get("ph") == "M" and not each["name"].startswith("thread"):
            continue
        moved = {**each, "pid": lanes[pid], "ts": each["ts"] + later}
        if "id" in each:  # of an arrow from one event to another
            moved["id"] = f"{rank}:{each['id']}"
        found.append(moved)
    return found
