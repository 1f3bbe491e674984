"""What each rank does at every moment of a step: it computes or waits, and for whom."""

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from labkit.notebook.profile.trace import ON_DEVICE
from labkit.notebook.profile.trace import Event
from labkit.notebook.profile.trace import Message
from labkit.notebook.profile.trace import Step
from labkit.notebook.profile.trace import Trace
from labkit.records import DATA_MARK

Spans = list[tuple[float, float]]
"""Disjoint, in order; in microseconds."""

PARTS = ("data", "compute", "communication", "other")
"""Of a step: the loop waits for a batch; operators (on a GPU kernels) run; nothing runs
while a collective or a message is under way; and the rest, which is Python, or sleep.
"""
COMMUNICATES = ("c10d::", "_c10d_functional::", "gloo:", "nccl", "record_param_comms")
SURROUNDS = ("autograd::", "torch::autograd::", "torch::jit")
"""Operators within which hooks run, which may wait: what they call counts."""
NEXT_BATCH = (DATA_MARK, "enumerate(DataLoader)")


# ---- spans of time ----


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The moments that are in any of them."""
    found: Spans = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        elif ended > began:
            found.append((began, ended))
    return found


def both(some: Spans, others: Spans) -> Spans:
    """The moments that are in both: in `some`, and not outside of `others`."""
    return without(some, without(some, others))


def without(some: Spans, others: Spans) -> Spans:
    """The moments of `some` that are in none of `others`."""
    found: Spans = []
    place = 0
    for began, ended in some:
        while place < len(others) and others[place][1] <= began:
            place += 1
        at = place
        while at < len(others) and others[at][0] < ended:
            if others[at][0] > began:
                found.append((began, others[at][0]))
            began = others[at][1]
            at += 1
        if ended > began:
            found.append((began, ended))
    return found


def total(spans: Spans) -> float:
    return sum(ended - began for began, ended in spans)


# ---- a step of a rank ----


@dataclass
class StepParts:
    """A step of a rank, divided."""

    step: Step
    spans: dict[str, Spans]
    """By part."""
    hidden: float = 0.0
    """Microseconds of collectives in which the rank computes."""
    collective: float = 0.0
    """Of all collectives."""
    waits: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By rank, how long nothing runs here until that one comes to a collective."""
    messages: float = 0.0
    """Of the time in communication, that in which it waits for one from another
    rank, and for no collective."""
    unsent: float = 0.0
    """Of the other time, that in which a message of its own has not been taken."""
    sending_by_kind: dict[str, float] = field(default_factory=dict)
    """By kind of collective, microseconds in which one is under way, nothing runs, and
    no rank is waited for."""
    num_operators: int = 0
    """Or kernels."""

    @property
    def sending(self) -> float:
        """Microseconds in which nothing runs and all ranks are in the collective."""
        waited = sum(self.waits.values()) + self.messages
        return max(0.0, self.microseconds("communication") - waited)

    @property
    def seconds(self) -> float:
        return (self.step.ended - self.step.began) / 1e6

    @property
    def asleep(self) -> float:
        """Microseconds of the other time in which the main thread does not run, and
        waits for no core."""
        step = self.step
        runs = step.on_core + step.queued
        waits = self.microseconds("communication") + self.microseconds("data")
        rest = step.ended - step.began - runs - waits
        return min(self.microseconds("other"), max(0.0, rest))

    @property
    def runs(self) -> float:
        """Of the time in which the main thread would run, the share in which it does:
        others have its core for the rest."""
        step = self.step
        wants = step.on_core + step.queued
        return step.on_core / wants if step.queued else 1.0

    @property
    def python(self) -> float:
        """Microseconds of the other time in which the main thread has a core."""
        return self.runs * (self.microseconds("other") - self.asleep)

    @property
    def for_messages(self) -> float:
        """Microseconds in which it waits for a message, or for one to be taken."""
        return self.messages + min(self.unsent, self.asleep)

    def share(self, part: str) -> float:
        """Of the step."""
        return total(self.spans[part]) / (self.step.ended - self.step.began)

    def microseconds(self, part: str) -> float:
        return total(self.spans[part])


def is_computing(event: Event, trace: Trace) -> bool:
    """Whether operators, or kernels on a GPU, run in it."""
    if trace.is_on_gpu:
        return event.kind in ON_DEVICE and not event.name.startswith(COMMUNICATES)
    return (
        event.kind == "cpu_op"
        and event.thread == trace.main_thread
        and "::" in event.name
        and not event.name.startswith((*COMMUNICATES, *SURROUNDS))
    )


def divide(trace: Trace) -> list[StepParts]:
    """The steps of a rank, each divided into its parts."""
    main = trace.main_thread
    operators = [each for each in trace.events if is_computing(each, trace)]
    computing = union((each.began, each.ended) for each in operators)
    starts = [each.began for each in operators]
    batches = union(
        (event.began, event.ended)
        for event in trace.events
        if event.thread == main and event.name.startswith(NEXT_BATCH)
    )
    collectives = union(
        (each.began, each.ended) for each in trace.messages if not each.is_between_two
    )
    # A message is sent on its way, and waited for later: only recv has one wait.
    messages = union(
        (each.began, each.ended) for each in trace.messages if each.kind != "send"
    )
    sent = union(
        (each.began, each.ended) for each in trace.messages if each.kind == "send"
    )
    if trace.is_on_gpu:
        batches = without(batches, union([*computing, *messages]))
    found = []
    for step in trace.steps:
        whole = [(step.began, step.ended)]
        data = both(whole, batches)
        rest = without(whole, data)
        compute = both(rest, computing)
        idle = without(rest, compute)
        communication = both(idle, messages)
        alone = without(communication, collectives)
        other = without(idle, communication)
        spans = {
            "data": data,
            "compute": compute,
            "communication": communication,
            "other": other,
        }
        under_way = both(whole, collectives)
        found.append(
            StepParts(
                step,
                spans,
                messages=total(alone),
                unsent=total(both(other, sent)),
                num_operators=sum(step.began <= at < step.ended for at in starts),
                hidden=total(both(under_way, compute)),
                collective=total(under_way),
            )
        )
    return found


# ---- ranks beside each other ----


def matched(traces: Sequence[Trace]) -> list[dict[int, Message]]:
    """The collectives in which all ranks of a group took part, by rank.

    The first of a kind, shape and group on one rank is the first on all. Where one rank
    has more of them than another none is matched. Where groups are not known it is all
    ranks that are matched.
    """
    rows: dict[Any, dict[int, list[Message]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        began, ended = trace.steps[0].began, trace.steps[-1].ended
        for each in trace.messages:
            if began <= each.began <= ended and not each.is_between_two:
                rows[each.ranks, each.kind, each.shape][trace.rank].append(each)
    everyone = {trace.rank for trace in traces}
    found = []
    for (ranks, *_), row in rows.items():
        members = everyone.intersection(ranks or everyone)
        counts = {len(each) for each in row.values()}
        if len(members) > 1 and row.keys() == members and len(counts) == 1:
            together = zip(*row.values(), strict=True)
            found += [dict(zip(row, each, strict=True)) for each in together]
    return found


def divide_all(traces: Sequence[Trace]) -> dict[int, list[StepParts]]:
    """The parts of every rank's steps, and who waits for whom in collectives."""
    parts = {trace.rank: divide(trace) for trace in traces}
    idle = {
        rank: union(span for each in steps for span in each.spans["communication"])
        for rank, steps in parts.items()
    }
    waits: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    """By the rank that waits and the last one, when: in several at a time, too."""
    for together in matched(traces):
        last = max(together, key=lambda rank: together[rank].began)
        come = together[last].began
        if come > min(each.ended for each in together.values()):
            continue  # of several groups
        for rank, each in together.items():
            if rank != last:
                waits[rank, last].append((each.began, come))
    for (rank, last), spans in waits.items():
        waited = both(union(spans), idle[rank])
        for divided in parts[rank]:
            whole = [(divided.step.began, divided.step.ended)]
            divided.waits[last] = total(both(waited, whole))
    for trace in traces:
        waited = union(
            span
            for (rank, _), each in waits.items()
            if rank == trace.rank
            for span in each
        )
        kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for message in trace.messages:
            if not message.is_between_two:
                kinds[message.kind].append((message.began, message.ended))
        for divided in parts[trace.rank]:
            sending = without(divided.spans["communication"], waited)
            divided.sending_by_kind = {
                kind: total(both(sending, union(spans)))
                for kind, spans in kinds.items()
            }
    return parts
