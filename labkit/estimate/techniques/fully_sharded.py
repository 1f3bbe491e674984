"""Memory of FSDP and HSDP: shards, with the block at work and the root whole."""

from math import prod

from labkit.estimate.plans import Memory
from labkit.estimate.plans import Plan
from labkit.estimate.rows import Sizes
from labkit.estimate.trace import Moment
from labkit.strategies import Strategy


def memory(plan: Plan, samples: int, sizes: Sizes, strategy: Strategy) -> Memory:
    """Shards, and the whole of the block at work and of the root.

    Forward: a block is gathered in one buffer and copied out of it; the buffer
    stays until the next block's. Backward: the next block is gathered meanwhile;
    the gradients are copied to a buffer that stays until the next one's.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group`.
    """
    num_shards = sizes["dp_shard"]
    trace = plan.trace(samples, casts_model=True)
    shards = shards_of(plan, num_shards)
    state, temporaries = plan.update(plan.trainable_of(shards))
    kept = 4.0 * sum(map(prod, shards)) + plan.buffers
    is_sharded = num_shards > 1
    padded = [0.0] * plan.num_units  # elements, with the shards' padding
    reduced = [0.0] * plan.num_units
    for shard, unit, size in zip(shards, plan.units, plan.trainable, strict=True):
        padded[unit] += prod(shard) * num_shards
        reduced[unit] += prod(shard) * num_shards if size else 0
    gathered = [plan.width * elements for elements in padded]
    buffer = [is_sharded * each for each in gathered]
    # gloo reduces in a copy of its own.
    copies = 1 + (plan.is_cpu and is_sharded)
    whole = 4.0 * sum(plan.trainable)
    kept_whole = whole if plan.accumulate > 1 else 0.0
    before = plan.neighbours(trace)
    after = {there: here for here, there in before.items()}
    by_unit = plan.finished_by_unit(trace)

    def gathering(moment: Moment) -> float:
        unit = moment.unit
        if not moment.is_backward:
            entered = unit or max(trace.entered, default=0)
            total = gathered[0] + buffer[entered]
            return total + (gathered[unit] if unit else 0) + kept_whole
        done = by_unit[moment.num_finished]
        total = gathered[0] + plan.width * done[0]
        # Of blocks that are through there are shards, of this one the whole.
        for other in range(1, plan.num_units):
            if other == unit:
                total += plan.width * done[other]
            elif done[other]:
                total += 4 * reduced[other] / num_shards
                if kept_whole:
                    total -= 4 * done[other]
        if unit:
            prefetched = before.get(unit, 0)
            reducing = after.get(unit, 0)
            total += gathered[unit] + buffer[prefetched] * bool(prefetched)
            total += 4 * reduced[reducing] * bool(reducing)
        return total + kept_whole

    peak = trace.peak(gathering)
    # When a block's gradients are copied, to be reduced.
    sharded = 0.0
    for unit in [*reversed(trace.entered), 0]:
        ends = next(
            moment.others
            for moment in trace.moments
            if by_unit[moment.num_finished][unit] == by_unit[-1][unit]
        )
        gradient = kept_whole - 4 * sharded
        if not kept_whole:
            gradient = plan.width * reduced[unit]
        buffers = 4 * reduced[unit]
        prefetched = before.get(unit, 0)
        peak = max(
            peak,
            ends
            + gathered[0]
            + buffer[prefetched] * bool(prefetched)
            + max(gradient + buffers, buffers * (copies + 1 / num_shards))
            + 4 * sharded / num_shards,
        )
        sharded += reduced[unit]
    own = 4.0 * sum(reduced) / num_shards
    return plan.components(
        trace,
        parameters=kept,
        gradients=kept_whole or own,
        optimizer_state=state,
        communication_buffers=gathered[0] + max([0.0, *gathered[1:]]),
        total_peak=kept + state + max(peak, own + temporaries),
    )


def setup(plan: Plan, sizes: Sizes, strategy: Strategy) -> float:
    return plan.arrival([*map(prod, shards_of(plan, sizes["dp_shard"]))])


def shards_of(plan: Plan, num_shards: int) -> list[tuple[int, ...]]:
    """The shapes of one rank's, which are cut along the first dimension."""
    return [(-(-s[0] // num_shards), *s[1:]) if s else () for s in plan.shapes]
