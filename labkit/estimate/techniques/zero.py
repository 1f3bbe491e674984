"""Memory of ZeRO under DeepSpeed: parts, buckets, and what is gathered of the rest."""

import itertools

from labkit.estimate.plans import Memory
from labkit.estimate.plans import Plan
from labkit.estimate.rows import Sizes
from labkit.estimate.trace import Moment
from labkit.estimate.trace import Trace
from labkit.strategies import Strategy
from labkit.strategies.zero.config import bucket_elements


def memory(plan: Plan, samples: int, sizes: Sizes, strategy: Strategy) -> Memory:
    trace, ranks = plan.trace(samples, casts_model=True), sizes["dp_shard"]
    if strategy.is_sharded:
        return sharded(plan, trace, ranks)
    return replicated(plan, trace, ranks, stage=strategy.variant["stage"])


def setup(plan: Plan, sizes: Sizes, strategy: Strategy) -> float:
    """Source: `labkit.strategies.zero.setup`."""
    # A trained parameter comes in fp32, also if it is rounded then. DeepSpeed makes
    # its copy in fp32 twice.
    width, ranks = plan.width, sizes["dp_shard"]
    rounded = max(plan.trainable) * (4.0 + width) * (width < 4)
    part = -(-sum(plan.trainable) // ranks)
    if strategy.is_sharded:
        own = width * sum(-(-size // ranks) for size in plan.sizes)
        most = max(rounded, width * max(plan.sizes), 8.0 * part)
        return own + plan.buffers + most
    whole_model = width * sum(plan.sizes) + plan.buffers
    return whole_model + max(rounded - width * max(plan.trainable), 8.0 * part)


def replicated(plan: Plan, trace: Trace, ranks: int, *, stage: int) -> Memory:
    """Whole parameters, a part of what updates them, and a bucket of gradients.

    Gradients are copied to the bucket, to be reduced; those of the parameters that
    a rank's part touches go on to a buffer, and in the step become a flat part in
    fp32. Stage 2 does so within the backward pass, stage 1 after it.

    Source: `deepspeed.runtime.zero.stage_1_and_2`.
    """
    width = plan.width
    total = sum(plan.trainable)
    part = -(-total // (2 * ranks)) * 2
    state, temporaries = plan.update([(part,)])
    bucket = bucket_elements(sum(plan.sizes), plan.device_type, stage)
    own = width * touched(plan, part, ranks)
    kept = width * sum(plan.sizes) + plan.buffers + state + 4.0 * part
    sizes = [0, *(plan.trainable[index] for index in trace.finished)]
    so_far = list(itertools.accumulate(sizes))
    # What earlier microbatches of the step have left.
    earlier = 0.0
    if plan.accumulate > 1:
        earlier = width * total if stage == 1 else own

    def gradients(moment: Moment) -> float:
        if not moment.is_backward:
            return earlier
        number = moment.num_finished
        if stage == 1:
            return width * bucket + (earlier or width * so_far[number])
        held = width * bucket + earlier
        if sizes[number] > bucket:
            # It is reduced by itself, sliced by the ranks it is for.
            held += width * sizes[number]
            sliced = width * min(part, sizes[number])
            is_first = so_far[number - 1] <= bucket
            return held + (max(own, sliced) if is_first else own + sliced)
        return held + own * (so_far[number] > bucket)

    peak = max(
        trace.peak(gradients),
        width * bucket + own + (width * total if stage == 1 else earlier),
        4 * part + max(temporaries, own),
    )
    return plan.components(
        trace,
        parameters=width * sum(plan.sizes) + plan.buffers,
        gradients=width * total if stage == 1 else own,
        optimizer_state=state,
        master_parameters=4.0 * part,
        communication_buffers=width * bucket,
        total_peak=kept + peak,
    )


def sharded(plan: Plan, trace: Trace, ranks: int) -> Memory:
    """A part of everything, and what is gathered of the parameters.

    A module's parameters are gathered for its forward and its backward pass, and
    as many as a bucket holds ahead of it. The bucket of gradients is always there;
    to be reduced, they are copied.

    Source: `deepspeed.runtime.zero.partitioned_param_coordinator` and `stage3`.
    """
    width = plan.width
    own = sum(-(-size // ranks) for size in plan.sizes)
    part = sum(-(-size // ranks) for size in plan.trainable)
    state, temporaries = plan.update([(part,)])
    bucket = bucket_elements(sum(plan.sizes), plan.device_type)
    alive = min(sum(plan.sizes), plan.largest_module + bucket)
    kept = width * (own + part + bucket) + plan.buffers + state + 4.0 * part
    sizes = [0, *(plan.trainable[index] for index in trace.finished)]
    copies = 1 + plan.is_cpu  # gloo reduces in a copy of its own

    def gathering(moment: Moment) -> float:
        size = sizes[moment.num_finished]
        return width * (alive + copies * size * (size > bucket))

    reduce = width * (copies * bucket + alive) + trace.moments[-1].others
    return plan.components(
        trace,
        parameters=width * own + plan.buffers,
        gradients=width * part,
        optimizer_state=state,
        master_parameters=4.0 * part,
        communication_buffers=width * (bucket + alive),
        total_peak=kept + max(trace.peak(gathering), reduce, 4 * part + temporaries),
    )


def touched(plan: Plan, part: int, ranks: int) -> int:
    """Elements of all parameters that a rank's part of the flat whole touches, on
    the rank where they are most."""
    ends = list(itertools.accumulate(plan.trainable))
    return max(
        sum(
            size
            for end, size in zip(ends, plan.trainable, strict=True)
            if end > rank * part and end - size < (rank + 1) * part
        )
        for rank in range(ranks)
    )
