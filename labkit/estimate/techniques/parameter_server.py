"""Memory of the fullest rank under a parameter server: a worker, or the server."""

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

    def gradients(moment: Moment) -> float:
        return whole if plan.accumulate > 1 else so_far[moment.num_finished]

    worker = kept + max(trace.peak(gradients), whole)
    # One worker's gradients are received a tensor at a time.
    received = 4.0 * max(plan.sizes, default=0)
    server = kept + whole + state + max(received, temporaries)
    return plan.components(
        trace,
        parameters=kept,
        gradients=whole,
        optimizer_state=state,
        total_peak=max(worker, server),
    )


def setup(plan: Plan, sizes: Sizes, strategy: Strategy) -> float:
    return 4.0 * sum(plan.sizes) + plan.buffers
