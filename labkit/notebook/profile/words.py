"""Says in words why steps are slow, and what helps."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from statistics import median

import pandas as pd

from labkit.notebook.history.collector import of_peak_rank
from labkit.notebook.plots.memory_bars import PART_LABELS
from labkit.notebook.profile.costs import in_steps
from labkit.notebook.profile.costs import length
from labkit.notebook.profile.parts import PARTS
from labkit.notebook.profile.parts import StepParts
from labkit.notebook.profile.parts import is_computing
from labkit.notebook.profile.trace import COMPARE
from labkit.notebook.profile.trace import Message
from labkit.notebook.profile.trace import Trace
from labkit.rank_spec import format_ranks
from labkit.records import PARTS as PARTS_OF_TENSORS
from labkit.records import format_bytes
from labkit.records import significant
from labkit.strategies import recorded_strategy

LATE = 0.1
"""Of every recorded step: what others wait for a rank that is called late. In a run in
which nothing is wrong ranks wait as long in some steps, now for one and now for
another."""
EXPLAINS = 0.4
"""Of what others wait for a rank, what it has to do longer than they."""
DATA = 0.15
NOT_HIDDEN = 0.2
MESSAGES = 0.15
CROWDED = 0.2
OUTSIDE = 0.35
"""Of every recorded step, as a mean over the ranks: what is worth a sentence."""
MANY_MESSAGES = 16
SMALL_BYTES = 2**16
SMALL_BUCKET = 2**20
SMALL_COST = 0.05
"""So many collectives of a kind in a step, of so few bytes each as a mean, that take so
much of it, are many small ones. DDP's first bucket has 1 MiB, the others 25."""
SHORT_KERNEL_US = 10.0
IDLE_GPU = 0.3
LARGE = 0.3
"""A part of so much of the steps, as a mean over all of them, is named where no reason
holds."""
WORTH_NAMING = 0.03
"""Of what tensors hold: a smaller part is left out."""
PASSES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "step": "optimizer's step",
}
NOTHING = (
    "Nothing stands out: no rank is late, and no part of the step but compute is large"
)

Parts = Mapping[int, Sequence[StepParts]]


def why_slow(traces: Sequence[Trace], parts: Parts, strategy: str) -> list[str]:
    """A sentence for each reason, the rank and the cause named."""
    if not any(step.num_operators for steps in parts.values() for step in steps):
        return ["No operator of torch ran in what was recorded"]
    found = [*late_ranks(traces, parts)]
    found += waits_for_data(parts)
    found += not_hidden(traces, parts, strategy)
    found += small_messages(traces, parts, strategy)
    found += waits_for_messages(parts, strategy)
    found += crowded(parts)
    found += short_kernels(traces, parts)
    found += outside_operators(traces, parts)
    return found


def without_reason(parts: Parts) -> str:
    """What is said where there is no reason."""
    every = [step for steps in parts.values() for step in steps]
    shares = {part: fmean(step.share(part) for step in every) for part in PARTS}
    compute = shares.pop("compute")
    part = max(shares, key=lambda each: shares[each])
    if shares[part] < LARGE:
        return NOTHING
    besides = " besides compute" if compute > shares[part] else ""
    return (
        f"No reason holds in every recorded step; the largest part{besides} is {part} "
        f"({percent(shares[part])} on average)"
    )


def least(steps: Sequence[StepParts], of: Callable[[StepParts], float]) -> float:
    """The share of a step that is so in every one of them."""
    return min(of(each) / 1e6 / each.seconds for each in steps)


def mean(steps: Sequence[StepParts], of: Callable[[StepParts], float]) -> float:
    """In microseconds a step."""
    return fmean(of(each) for each in steps)


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def ms(microseconds: float) -> str:
    return f"{significant(microseconds / 1e3)} ms"


# ---- one rank ----


def late_ranks(traces: Sequence[Trace], parts: Parts) -> list[str]:
    """The ranks for which others wait in every step, and what they do meanwhile."""
    found = []
    for trace in traces:
        others = [each for each in traces if each.rank != trace.rank]
        waited = partial(time_for, trace.rank)
        those = [
            each.rank for each in others if least(parts[each.rank], waited) >= LATE
        ]
        if not those or len(those) < len(others) / 2:
            continue
        every = [step for rank in those for step in parts[rank]]
        cause = cause_of(trace, others, parts, waited_for=mean(every, waited))
        if not cause:
            continue
        names = format_ranks(those)
        verb = "waits" if len(those) == 1 else "wait"
        share = fmean(waited(step) / 1e6 / step.seconds for step in every)
        found.append(
            f"{names[0].upper()}{names[1:]} {verb} {percent(share)} of the step for "
            f"rank {trace.rank}{cause}"
        )
    return found


def time_for(rank: int, step: StepParts) -> float:
    """What is waited for a rank, in microseconds."""
    return step.waits[rank]


def cause_of(
    trace: Trace, others: Sequence[Trace], parts: Parts, *, waited_for: float
) -> str:
    """What a rank does for longer than the others, as the end of a sentence; "" where
    that is not what they wait for: collectives that are under way together begin
    whenever a thread is free."""
    # As far as it runs: it takes longer where others have the core, whatever it is.
    kinds: dict[str, Callable[[StepParts], float]] = {
        "data": lambda step: step.runs * step.microseconds("data"),
        "compute": lambda step: step.runs * step.microseconds("compute"),
        "other": lambda step: step.asleep + step.python,
        "queued": lambda step: step.step.queued,
    }
    ours, more = {}, {}
    for kind, of in kinds.items():
        ours[kind] = mean(parts[trace.rank], of)
        theirs = median(mean(parts[each.rank], of) for each in others)
        more[kind] = ours[kind] - theirs
    queued = more.pop("queued")
    kind = max(more, key=lambda each: more[each])
    runs = fmean(step.runs for step in parts[trace.rank])
    if more[kind] < EXPLAINS * runs * waited_for:
        if queued < EXPLAINS * waited_for:
            return ""
        return (
            f", which waits {ms(ours['queued'])} of each step for a core that other "
            "processes of its machine have"
        )
    if kind == "data":
        took, they_took = (
            mean(parts[rank], lambda step: step.microseconds("data"))
            for rank in (trace.rank, others[0].rank)
        )
        return (
            f"'s data loading: its next batch takes {ms(took)}, that of rank "
            f"{others[0].rank} {ms(they_took)}"
        )
    if kind == "other":
        is_asleep = mean(parts[trace.rank], lambda s: s.asleep) > more[kind] / 2
        doing = (
            "sleeping, or waiting for a file, a lock or another process"
            if is_asleep
            else "running Python code"
        )
        return (
            f", which spends {ms(more[kind])} more than the others outside of "
            f"operators: {doing}"
        )
    return computes_more(trace, others, parts, more[kind])


def computes_more(
    trace: Trace, others: Sequence[Trace], parts: Parts, more: float
) -> str:
    """Whether it has more operators, or the same ones take longer."""
    counts = [
        mean(parts[each.rank], lambda step: step.num_operators)
        for each in (trace, *others)
    ]
    text = f", which computes {ms(more)} longer than the others"
    extra = counts[0] - median(counts[1:])
    if extra < 1:
        return f"{text}, in as many operators"
    ours, theirs = time_by_operator(trace), time_by_operator(others[0])
    ours.subtract(theirs)
    [(name, _)] = ours.most_common(1)
    return f"{text}, in {significant(extra)} more operators, most of it in {name}"


def time_by_operator(trace: Trace) -> Counter[str]:
    taken: Counter[str] = Counter()
    for each in in_steps(trace):
        if is_computing(each, trace):
            taken[each.name] += int(length(each))
    return taken


# ---- all ranks ----


def waits_for_data(parts: Parts) -> list[str]:
    shares = [
        least(steps, lambda step: step.microseconds("data")) for steps in parts.values()
    ]
    if min(shares) < DATA:
        return []
    who = "Every rank waits" if len(parts) > 1 else "The loop waits"
    taken = fmean(
        mean(steps, lambda step: step.share("data")) for steps in parts.values()
    )
    return [
        f"{who} {percent(taken)} of the step for its next batch: load ahead, with a "
        "DataLoader that has num_workers"
    ]


def kinds_of(traces: Sequence[Trace]) -> dict[str, list[Message]]:
    """The collectives of the first rank, by kind; not labkit's own comparisons."""
    first = traces[0]
    found: dict[str, list[Message]] = {}
    for each in first.messages:
        is_one = not each.is_between_two and each.kind != COMPARE
        if is_one and first.is_in_step(each.began):
            found.setdefault(each.kind, []).append(each)
    return found


def not_hidden(traces: Sequence[Trace], parts: Parts, strategy: str) -> list[str]:
    shares = [least(steps, lambda step: step.sending) for steps in parts.values()]
    kinds = kinds_of(traces)
    if fmean(shares) < NOT_HIDDEN or not kinds:
        return []
    every = [step for steps in parts.values() for step in steps]
    taken = fmean(step.sending / 1e6 / step.seconds for step in every)
    hidden = sum(s.hidden for s in every) / max(1.0, sum(s.collective for s in every))
    kind = max(kinds, key=lambda each: sum(m.ended - m.began for m in kinds[each]))
    largest = max(each.num_bytes for each in kinds[kind])
    number = len(kinds[kind]) / len(traces[0].steps)
    known = recorded_strategy(strategy)
    advice = "larger batches or --accumulate send less often"
    if known.is_by_hand:
        advice = "larger batches send less often"
    elif "comm" in known.options:
        advice = "larger batches, --accumulate or --comm send less often or less"
    return [
        f"Communication is not hidden: {percent(taken)} of the step goes into "
        f"collectives while nothing is computed, and {percent(hidden)} of their time "
        f"is hidden; most of it is {kind}, {significant(number)} a step of up to "
        f"{size(largest)}: {advice}"
    ]


def small_messages(traces: Sequence[Trace], parts: Parts, strategy: str) -> list[str]:
    found = []
    every = [step for steps in parts.values() for step in steps]
    small = SMALL_BUCKET if strategy == "ddp" else SMALL_BYTES
    for kind, messages in kinds_of(traces).items():
        number = len(messages) / len(traces[0].steps)
        each = fmean(message.num_bytes for message in messages)
        cost = fmean(
            step.sending_by_kind.get(kind, 0.0) / 1e6 / step.seconds for step in every
        )
        if number >= MANY_MESSAGES and each <= small and cost >= SMALL_COST:
            advice = (
                "larger buckets (bucket_cap_mb, 25 by default) send the same in fewer"
                if strategy == "ddp"
                else "each costs time of its own, whatever its size"
            )
            found.append(
                f"{significant(number)} {kind}s a step of {size(each)} each, as a "
                f"mean: {advice}"
            )
    return found


def waits_for_messages(parts: Parts, strategy: str) -> list[str]:
    shares = [least(steps, lambda step: step.for_messages) for steps in parts.values()]
    if fmean(shares) < MESSAGES:
        return []
    every = [step for steps in parts.values() for step in steps]
    taken = fmean(step.for_messages / 1e6 / step.seconds for step in every)
    who = "Ranks wait" if len(parts) > 1 else "The rank that trains waits"
    text = f"{who} {percent(taken)} of the step for messages of other ranks"
    if "microbatches" in recorded_strategy(strategy).options:
        text += ": more --microbatches keep ranks busy"
    return [text]


def crowded(parts: Parts) -> list[str]:
    shares = [least(steps, lambda step: step.step.queued) for steps in parts.values()]
    if fmean(shares) < CROWDED:
        return []
    every = [step for steps in parts.values() for step in steps]
    taken = fmean(step.step.queued / 1e6 / step.seconds for step in every)
    who = "Ranks wait" if len(parts) > 1 else "The rank waits"
    return [
        f"{who} {percent(taken)} of the step for a core: more processes want to run on "
        "this machine than it has cores; use fewer ranks, or end other processes"
    ]


def short_kernels(traces: Sequence[Trace], parts: Parts) -> list[str]:
    found = []
    for trace in traces:
        if not trace.is_on_gpu:
            continue
        kernels = [each for each in in_steps(trace) if each.kind == "kernel"]
        if not kernels:
            continue
        mean_us = fmean(map(length, kernels))
        steps = parts[trace.rank]
        idle = least(steps, lambda step: step.microseconds("other"))
        if mean_us < SHORT_KERNEL_US and idle > IDLE_GPU:
            number = len(kernels) / len(trace.steps)
            found.append(
                f"Rank {trace.rank} runs {significant(number)} kernels a step of "
                f"{significant(mean_us)} µs each, and its GPU idles {percent(idle)} of "
                "the step: larger batches, or --compile"
            )
    return found


def outside_operators(traces: Sequence[Trace], parts: Parts) -> list[str]:
    every = [step for steps in parts.values() for step in steps]
    shares = [least(steps, lambda step: step.python) for steps in parts.values()]
    if traces[0].is_on_gpu or min(shares) < OUTSIDE:
        return []
    taken = fmean(step.python / 1e6 / step.seconds for step in every)
    number = fmean(step.num_operators for step in every)
    each = fmean(step.microseconds("compute") for step in every) / max(1.0, number)
    return [
        f"{percent(taken)} of the step is Python outside of operators; the step has "
        f"{significant(number)} operators, {significant(each)} µs each on average: "
        "larger batches or --compile"
    ]


def memory_held(moments: pd.DataFrame) -> list[str]:
    """What tensors hold at most, and what that is; `moments` as `Run.step_memory`."""
    moments = of_peak_rank(moments)
    if moments.empty:
        return []
    parts = moments[[*PARTS_OF_TENSORS]]
    place = int(parts.sum(axis=1).to_numpy().argmax())
    at = moments.iloc[place]
    peak = parts.iloc[place]
    total = float(peak.sum())
    shares = peak[peak >= WORTH_NAMING * total].sort_values(ascending=False)
    named = ", ".join(
        f"{PART_LABELS.get(str(part), part)} {percent(held / total)}"
        for part, held in shares.items()
    )
    return [
        f"memory: at most {size(total)} in step {at['step']:,}, in the "
        f"{PASSES[at['phase']]} of rank {at['rank']}: {named}"
    ]


def size(num_bytes: float) -> str:
    """As "12.4 KiB"."""
    if num_bytes < 2**20:
        return f"{significant(num_bytes / 2**10)} KiB"
    return format_bytes(num_bytes)
