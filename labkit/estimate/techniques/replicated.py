"""Memory of one process, and of DDP, whose gradients stay in its buckets."""

from labkit.estimate.plans import Memory
from labkit.estimate.plans import Plan
from labkit.estimate.rows import Sizes
from labkit.estimate.trace import Moment
from labkit.strategies import Strategy


def memory(plan: Plan, samples: int, sizes: Sizes, strategy: Strategy) -> Memory:
    trace = plan.trace(samples)
    whole = 4.0 * sum(plan.trainable)
    state, temporaries = plan.update(plan.trainable_of(plan.shapes))
    kept = 4.0 * sum(plan.sizes) + plan.buffers
    so_far = plan.finished_bytes(trace, 4)
    is_whole = has_buckets(sizes) or plan.accumulate > 1

    def gradients(moment: Moment) -> float:
        return whole if is_whole else so_far[moment.num_finished]

    return plan.components(
        trace,
        parameters=kept,
        gradients=whole,
        optimizer_state=state,
        total_peak=kept + state + max(trace.peak(gradients), whole + temporaries),
    )


def setup(plan: Plan, sizes: Sizes, strategy: Strategy) -> float:
    buckets = 4.0 * sum(plan.trainable) * has_buckets(sizes)
    return 4.0 * sum(plan.sizes) + plan.buffers + buckets


def has_buckets(sizes: Sizes) -> bool:
    """Whether gradients have a place of their own, to be averaged."""
    return "dp_replicate" in sizes
