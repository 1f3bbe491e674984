"""Reads the trace that a rank has written of some steps, as torch.profiler does."""

import bisect
import functools
import gzip
import json
import zlib
from collections import Counter
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from math import prod
from pathlib import Path
from typing import Any
from typing import NamedTuple

from labkit.json_files import parse
from labkit.records import COMPARE_MARK
from labkit.records import STEP_MARK
from labkit.records import format_bytes

MAX_BYTES = 2**28
"""Of a trace, unpacked: some million events, for which the notebook needs ten times as
much memory."""
SIZES = {
    **{"double": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2},
    **{"c10::BFloat16": 2, "unsigned char": 1, "signed char": 1, "bool": 1},
}
"""Bytes of an element, by the type's name in a trace."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CPU = 0
"""The type of a device, as torch numbers them: c10::DeviceType."""
UPDATE = "Optimizer.step#"
"""What the range begins with that torch has an optimizer's step take."""
BETWEEN_TWO = ("send", "recv")
COMPARE = "compare"
"""The kind of a comparison of labkit's own: no collective of the strategy's."""


class Event(NamedTuple):
    """Something that took time on a rank."""

    name: str
    kind: str
    """"cpu_op", "user_annotation", "kernel", ..."""
    thread: Any
    began: float
    ended: float
    """In microseconds since 1970, as `Trace.base` says."""
    args: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return (self.ended - self.began) / 1e6


class Step(NamedTuple):
    """A step that was recorded."""

    number: int
    began: float
    ended: float
    on_core: float
    """Microseconds for which the main thread had a core."""
    queued: float = 0.0
    """Microseconds for which it waited for one, that others had."""


class Message(NamedTuple):
    """A collective, or a message between two ranks."""

    kind: str
    """"all_reduce", "send", ..."""
    shape: str
    """What it is matched by with those of the other ranks."""
    num_bytes: int
    began: float
    ended: float
    ranks: tuple[int, ...] = ()
    """Of its group; none where that is not known."""

    @property
    def is_between_two(self) -> bool:
        return self.kind in BETWEEN_TWO


@dataclass
class Trace:
    """What a rank has recorded."""

    rank: int
    device: str
    steps: list[Step]
    events: list[Event]
    messages: list[Message]
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    """Moments, the bytes that had been allocated on the rank's device since the
    recording began, and those that its allocator had of it."""
    device_name: str = ""
    """Of a GPU, as "NVIDIA H100 80GB HBM3"."""
    clock_error: float = 0.0
    """Microseconds by which its times differ from the host's clock, at most."""
    offset: float = 0.0
    """Microseconds by which its clock is ahead of that of the first rank."""
    offset_error: float = 0.0

    @property
    def is_on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def is_in_step(self, moment: float) -> bool:
        """Whether it is in one that was recorded, and not between two passes."""
        place = bisect.bisect_right(self.steps, moment, key=lambda step: step.began)
        return place > 0 and moment < self.steps[place - 1].ended

    @functools.cached_property
    def main_thread(self) -> Any:
        return next(e.thread for e in self.events if is_step_mark(e))


def read_json(path: Path) -> dict[str, Any]:
    """The trace in a file; ValueError for one that is none, or too large."""
    try:
        with gzip.open(path) as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(
                f"{path.name} has more than the {format_bytes(MAX_BYTES)}, unpacked, "
                "that are read here: profile fewer steps, or drop the file itself into "
                "ui.perfetto.dev"
            )
        found = json.loads(text)
    except (OSError, EOFError, zlib.error, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a trace: {error}") from error
    if not isinstance(found, dict) or "labkit" not in found:
        raise ValueError(f"{path} is not a trace of a rank's steps")
    return found


def read_trace(path: Path) -> Trace:
    """What the rank that wrote this file recorded; ValueError where that is none."""
    content = read_json(path)
    try:
        return trace_of(content)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def trace_of(content: Mapping[str, Any]) -> Trace:
    """The trace in what was read; ValueError where it has no steps."""
    facts = content["labkit"]
    noted = {row[0]: row for row in parse(list[list[int]], facts["steps"], "steps")}
    base = float(content.get("baseTimeNanoseconds", 0)) / 1e3
    events: list[Event] = []
    memory: list[tuple[float, int, int]] = []
    for each in content["traceEvents"]:
        if each.get("ph") == "X":
            began = base + each["ts"]
            events.append(
                Event(
                    each["name"],
                    each.get("cat", ""),
                    each.get("tid"),
                    began,
                    began + each.get("dur", 0),
                    each.get("args", {}),
                )
            )
        elif each.get("name") == "[memory]":
            args = each["args"]
            if (args["Device Type"] == CPU) != facts["device"].startswith("cuda"):
                held = args["Total Allocated"], args["Total Reserved"]
                memory.append((base + each["ts"], *map(int, held)))
    marks = {STEP_MARK.format(number): row for number, row in noted.items()}
    steps: dict[int, Step] = {}
    errors = []
    events.sort(key=lambda event: (event.began, -event.ended))
    for event in events:
        if (row := marks.get(event.name)) and event.kind == "user_annotation":
            number, began_ns = row[:2]
            on_core, queued = ((row[i + 2] - row[i]) / 1e3 for i in (2, 3))
            # One that found no batch, at the end of a pass, has begun once more.
            steps[number] = Step(number, event.began, event.ended, on_core, queued)
            errors.append(event.began - began_ns / 1e3)
    if not steps:
        raise ValueError(f"the trace of rank {facts['rank']} has no steps")
    # A thread may lose its core between one clock and the other.
    error = min(errors, key=abs)
    groups = groups_of_threads(events, facts.get("calls", []), error)
    return Trace(
        facts["rank"],
        facts["device"],
        sorted(steps.values()),
        events,
        [found for event in events if (found := message_of(event, groups))],
        sorted(memory),
        device_name=name_of_device(content, facts["device"]),
        clock_error=abs(error),
    )


def end_before_updates(trace: Trace) -> None:
    """Have no collective of gloo's outlast the backward pass that it is of.

    Its thread notes when it has ended after it has told the rank so: where another one
    takes its core at that moment, milliseconds later. Every strategy has its gradients
    when an optimizer begins to update.
    """
    updates = [
        event.began
        for event in trace.events
        if event.name.startswith(UPDATE) and event.thread == trace.main_thread
    ]

    def until_update(message: Message) -> Message:
        place = bisect.bisect_right(updates, message.began)
        ended = min([message.ended, *updates[place : place + 1]])
        return message._replace(ended=ended)

    if not trace.is_on_gpu:
        trace.messages = [
            each if each.is_between_two else until_update(each)
            for each in trace.messages
        ]


def name_of_device(content: Mapping[str, Any], device: str) -> str:
    """What the GPU that a rank computes on is called; "" where there is none."""
    number = int(device.partition(":")[2] or 0)
    for each in content.get("deviceProperties", []):
        if each.get("id") == number and device.startswith("cuda"):
            return str(each.get("name", ""))
    return ""


def is_step_mark(event: Event) -> bool:
    return event.name.startswith(STEP_MARK.format("")) and (
        event.kind == "user_annotation"
    )


def groups_of_threads(
    events: Iterable[Event], noted: Iterable[tuple[str, int, list[int]]], ahead: float
) -> dict[Any, tuple[int, ...]]:
    """By gloo's threads, each of which serves one group: that group's ranks.

    A collective begins on such a thread soon after it was called: the last call of its
    name before that is its own, unless several are under way. So most of them decide.
    `ahead` is by how much the clock of the events is ahead of that of the calls.
    """
    calls: dict[str, list[tuple[float, tuple[int, ...]]]] = defaultdict(list)
    for name, called_ns, ranks in sorted(noted, key=lambda call: call[1]):
        calls[name].append((called_ns / 1e3 + ahead, tuple(ranks)))
    found: dict[Any, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for event in events:
        if event.name.startswith("gloo:") and (own := calls.get(event.name)):
            place = bisect.bisect_right(own, event.began, key=lambda call: call[0])
            if place:
                found[event.thread][own[place - 1][1]] += 1
    most = {thread: counts.most_common(1)[0] for thread, counts in found.items()}
    return {
        thread: ranks
        for thread, (ranks, count) in most.items()
        if count > found[thread].total() / 2
    }


def ranks_in(text: Any) -> tuple[int, ...]:
    """The ranks of a group as NCCL's kernels have them; none where they are cut."""
    try:
        return tuple(parse(list[int], json.loads(str(text)), "ranks"))
    except ValueError:
        return ()


def message_of(event: Event, groups: Mapping[Any, tuple[int, ...]]) -> Message | None:
    """The collective or message that an event is the whole of, if it is one.

    gloo's are ranges, from where they begin to where they have ended; NCCL's kernels.
    """
    name, args = event.name, event.args
    if name.startswith("gloo:"):
        shapes = args.get("Input Dims") or []
        kinds = args.get("Input type") or []
        num_bytes = sum(
            prod(shape) * SIZES.get(kind, 0)
            for shape, kind in zip(shapes, kinds, strict=False)
            if all(isinstance(size, int) for size in shape)
        )
        kind, shape = name.removeprefix("gloo:"), str(shapes)
        ranks = groups.get(event.thread, ())
    elif name.startswith(COMPARE_MARK.format("")):
        of = name.removeprefix(COMPARE_MARK.format(""))
        return Message(COMPARE, "", 0, event.began, event.ended, ranks_in(f"[{of}]"))
    elif event.kind == "kernel" and name.startswith("nccl"):
        kind = str(args.get("Collective name", name.split("_")[1:2])).strip("_")
        count, dtype = args.get("In msg nelems", 0), str(args.get("dtype", ""))
        num_bytes = count * {"Float": 4, "BFloat16": 2, "Half": 2}.get(dtype, 1)
        shape = f"{args.get('Process Group Name')} {count} {dtype}"
        ranks = ranks_in(args.get("Process Group Ranks"))
    else:
        return None
    return Message(kind, shape, num_bytes, event.began, event.ended, ranks)
