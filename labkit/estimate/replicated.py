"""Memory of one process, and of DDP, whose gradients stay in its buckets."""

from labkit.estimate.plans import Memory
from labkit.estimate.plans import Plan
from labkit.estimate.trace import Moment
from labkit.estimate.trace import Trace
from labkit.strategies import Strategy


def memory(plan: Plan, trace: Trace, ranks: int, strategy: Strategy) -> Memory:
    whole = 4.0 * sum(plan.trainable)
    state, temporaries = plan.update(plan.trainable_of(plan.shapes))
    kept = 4.0 * sum(plan.sizes) + plan.buffers
    so_far = plan.finished_bytes(trace, 4)
    is_whole = not strategy.is_single or plan.accumulate > 1

    def gradients(moment: Moment) -> float:
        return whole if is_whole else so_far[moment.num_finished]

    return plan.components(
        trace,
        parameters=kept,
        gradients=whole,
        optimizer_state=state,
        total_peak=kept + state + max(trace.peak(gradients), whole + temporaries),
    )


def setup(plan: Plan, ranks: int, strategy: Strategy) -> float:
    buckets = 0.0 if strategy.is_single else 4.0 * sum(plan.trainable)
    return 4.0 * sum(plan.sizes) + plan.buffers + buckets
