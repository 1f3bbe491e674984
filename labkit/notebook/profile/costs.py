"""What operators and modules take of a step, with their shapes."""

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import pandas as pd

from labkit.notebook.profile.parts import is_computing
from labkit.notebook.profile.trace import Event
from labkit.notebook.profile.trace import Trace
from labkit.records import MODULE_MARK

EVALUATE = "autograd::engine::evaluate_function"


def operators(traces: Sequence[Trace]) -> pd.DataFrame:
    """What each operator takes of a step by itself, without those that it calls; on a
    GPU its kernels. As means over the ranks; the costliest first."""
    taken: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for trace in traces:
        events = [each for each in in_steps(trace) if is_computing(each, trace)]
        own = own_times(events) if not trace.is_on_gpu else map(length, events)
        share = 1 / (len(trace.steps) * len(traces))
        for event, microseconds in zip(events, own, strict=True):
            row = taken[event.name, shapes_of(event)]
            row[0] += share
            row[1] += microseconds / 1e3 * share
    return table(
        ["operator", "shapes", "calls", "ms"],
        ((*key, *row) for key, row in taken.items()),
    )


def modules(traces: Sequence[Trace]) -> pd.DataFrame:
    """What the forward and the backward pass of each module take of a step, with those
    within it. As means over the ranks; the costliest first."""
    taken: dict[str, list[Any]] = defaultdict(lambda: ["", 0.0, 0.0, 0.0])
    for trace in traces:
        share = 1 / (len(trace.steps) * len(traces))
        around: dict[int, list[str]] = {}
        """By sequence number, the modules in whose forward pass an operator began."""
        inside: list[Event] = []
        for event in in_steps(trace):
            if event.thread != trace.main_thread:
                continue
            while inside and inside[-1].ended <= event.began:
                inside.pop()
            number = event.args.get("Sequence number")
            if event.name.startswith(MODULE_MARK):
                inside.append(event)
                row = taken[module_of(event)]
                row[1] += share
                row[2] += length(event) / 1e3 * share
            elif event.name.startswith(EVALUATE):
                for name in set(around.get(number or -1, [])):
                    taken[name][3] += length(event) / 1e3 * share
            elif inside and event.kind == "cpu_op":
                for each in inside:  # its input is that of its first operator
                    row = taken[module_of(each)]
                    row[0] = row[0] or shapes_of(event)
                if number is not None:
                    around[number] = [module_of(each) for each in inside]
    rows = ((name, *row, row[2] + row[3]) for name, row in taken.items())
    names = ["module", "shapes", "calls", "forward_ms", "backward_ms", "ms"]
    return table(names, rows)


def table(names: list[str], rows: Iterable[tuple[Any, ...]]) -> pd.DataFrame:
    """The rows, those that take most first."""
    found = pd.DataFrame(list(rows), columns=names)
    return found.sort_values("ms", ascending=False, ignore_index=True)


def in_steps(trace: Trace) -> list[Event]:
    """The events that begin in one of the recorded steps."""
    return [each for each in trace.events if trace.is_in_step(each.began)]


def own_times(events: Sequence[Event]) -> list[float]:
    """Microseconds of each that are in none within it; they are in order of time."""
    own = [length(event) for event in events]
    around: list[int] = []
    for place, event in enumerate(events):
        while around and events[around[-1]].ended <= event.began:
            around.pop()
        if around:
            own[around[-1]] -= length(event)
        around.append(place)
    return own


def length(event: Event) -> float:
    return event.ended - event.began


def shapes_of(event: Event) -> str:
    """Of its tensors, as "32x256 256x10"."""
    shapes = event.args.get("Input Dims") or []
    flat = [each for each in shapes if each and all(isinstance(n, int) for n in each)]
    return " ".join("x".join(map(str, shape)) for shape in flat)


def module_of(event: Event) -> str:
    return event.name.removeprefix(MODULE_MARK)
