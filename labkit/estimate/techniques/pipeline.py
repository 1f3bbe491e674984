"""Memory of stages: of the rank that has the fullest, in the order of 1F1B.

The whole model is traced with a microbatch, and what is alive counts for the stage that
computes it.
"""

from labkit.compat.torch import BatchNormBase
from labkit.estimate.plans import Memory
from labkit.estimate.plans import Plan
from labkit.estimate.rows import Sizes
from labkit.strategies import Strategy
from labkit.strategies.pipeline.microbatches import MICROBATCHES_A_STAGE
from labkit.strategies.relay.stages import Stages
from labkit.strategies.relay.stages import cut


def memory(plan: Plan, samples: int, sizes: Sizes, strategy: Strategy) -> Memory:
    stages = cut(plan.model, sizes["pp"], {})
    num_stages = stages.num_stages
    num_microbatches = max(1, min(MICROBATCHES_A_STAGE * sizes["pp"], samples))
    if any(isinstance(each, BatchNormBase) for each in plan.model.modules()):
        num_microbatches = 1  # their statistics are of a whole batch
    is_scheduled = num_microbatches >= num_stages
    traces = plan.trace_stages(-(-samples // num_microbatches), stages)
    found = []
    for stage, own in enumerate(parameters_of(plan, stages)):
        trace, is_last = traces[stage], stage == num_stages - 1
        gets = trace.received
        gives = 0.0 if is_last else traces[stage + 1].received
        shapes = [plan.shapes[i] for i in own if plan.trainable[i]]
        state, temporaries = plan.update(shapes)
        kept = 4.0 * sum(plan.sizes[i] for i in own) + plan.buffers
        whole = 4.0 * sum(plan.trainable[i] for i in own)
        if is_scheduled:
            # Source: `torch.distributed.pipelining.schedules.Schedule1F1B`.
            in_flight = min(num_microbatches, num_stages - stage)
            activations = in_flight * trace.activations + gives
            # `PipelineStage` has a place for each microbatch of what others send it.
            buffers = num_microbatches * (gets + gives)
        else:
            in_flight = num_microbatches
            activations = in_flight * (trace.activations + gets)
            buffers = in_flight * gets
        others = max(0.0, (in_flight - 1) * trace.activations)  # also where that is NaN
        at_peak = others + trace.peak()
        if is_last and is_scheduled:
            # It keeps what the model returned for a microbatch, until it has compared
            # the loss of that and the next one together with the mean of theirs.
            compared = 4 * trace.returned + 2 * trace.in_loss
            at_peak = max(at_peak + trace.returned, activations + compared)
            activations += trace.returned
        found.append(
            plan.components(
                trace,
                parameters=kept,
                gradients=whole,
                optimizer_state=state,
                activations_peak=activations,
                total_peak=kept + whole + state + buffers + max(at_peak, temporaries),
            )
        )
    return {name: max(each[name] for each in found) for name in found[0]}


def setup(plan: Plan, sizes: Sizes, strategy: Strategy) -> float:
    """What a stage has comes to it a layer at a time, and nothing else."""
    parts = parameters_of(plan, cut(plan.model, sizes["pp"], {}))
    return plan.buffers + max(4.0 * sum(plan.sizes[i] for i in own) for own in parts)


def parameters_of(plan: Plan, stages: Stages) -> list[list[int]]:
    """By stage, the indices of the parameters that it has: of its own layers, and of
    none."""
    owners = stages.owners()
    everywhere = set(range(stages.num_stages))
    having = [owners.get(id(p), everywhere) for p in plan.model.parameters()]
    return [
        [index for index, each in enumerate(having) if stage in each]
        for stage in range(stages.num_stages)
    ]
