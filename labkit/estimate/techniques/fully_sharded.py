"""Memory of FSDP and HSDP: shards, with the block at work and the root whole."""

from math import prod

from labkit.estimate.plans import Memory
from labkit.estimate.plans import Plan
from labkit.estimate.rows import Sizes
from labkit.estimate.trace import Moment
from labkit.estimate.trace import Trace
from labkit.strategies import Strategy


def memory(plan: Plan, samples: int, sizes: Sizes, strategy: Strategy) -> Memory:
    """Shards, and the whole of the block at work and of the root."""
    num_shards = sizes["dp_shard"]
    trace = plan.trace(samples, casts_model=True)
    shards = shards_of(plan, num_shards)
    state, temporaries = plan.update(plan.trainable_of(shards))
    kept = 4.0 * sum(map(prod, shards)) + plan.buffers
    step = ShardedStep(plan, trace, num_shards)
    own = 4.0 * sum(step.reduced) / num_shards
    peak = max(trace.peak(step.gathered_at), step.peak_of_reducing())
    return plan.components(
        trace,
        parameters=kept,
        gradients=step.accumulated or own,
        optimizer_state=state,
        communication_buffers=step.gathered[0] + max([0.0, *step.gathered[1:]]),
        total_peak=kept + state + max(peak, own + temporaries),
    )


class ShardedStep:
    """What is whole in a step, by block: number 0 is the root, with what is in none.

    Forward: a block is gathered in one buffer and copied out of it; the buffer
    stays until the next block's. Backward: the next block is gathered meanwhile;
    the gradients are copied to a buffer that stays until the next one's.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group`.
    """

    def __init__(self, plan: Plan, trace: Trace, num_shards: int) -> None:
        self.plan = plan
        self.trace = trace
        self.num_shards = num_shards
        self.gathered = [0.0] * plan.num_units
        """Bytes of parameters, with the shards' padding."""
        self.reduced = [0.0] * plan.num_units
        """Elements of gradients, with that padding."""
        shards = shards_of(plan, num_shards)
        for shard, unit, size in zip(shards, plan.units, plan.trainable, strict=True):
            self.gathered[unit] += plan.width * prod(shard) * num_shards
            self.reduced[unit] += prod(shard) * num_shards if size else 0
        self.accumulated = 4.0 * sum(plan.trainable) if plan.accumulate > 1 else 0.0
        """Bytes of gradients that are whole until the last microbatch is through."""
        self.before = plan.neighbours(trace)
        self.after = {there: here for here, there in self.before.items()}
        self.done = plan.finished_by_unit(trace)

    def buffer(self, unit: int | None) -> float:
        """Bytes in which a block, if it is one, is gathered."""
        return 0.0 if unit is None or self.num_shards == 1 else self.gathered[unit]

    def gathered_at(self, moment: Moment) -> float:
        """Bytes of parameters and gradients besides the shards, and those of blocks
        that are through the backward pass."""
        width, unit = self.plan.width, moment.unit
        total = self.gathered[0] + (self.gathered[unit] if unit else 0)
        total += self.accumulated
        if not moment.is_backward:
            return total + self.buffer(unit or max(self.trace.entered, default=0))
        done = self.done[moment.num_finished]
        total += width * (done[0] + (done[unit] if unit else 0))
        for other in range(1, self.plan.num_units):
            if other != unit and done[other]:  # it is through: there are shards of it
                total += 4 * self.reduced[other] / self.num_shards
                total -= 4 * done[other] * (self.accumulated > 0)
        total += self.buffer(self.before.get(unit))
        if unit in self.after:
            total += 4 * self.reduced[self.after[unit]]
        return total

    def peak_of_reducing(self) -> float:
        """Bytes where a block's gradients are copied, to be reduced, at the most."""
        plan, done = self.plan, self.done
        # gloo reduces in a copy of its own.
        copies = 1 + (plan.is_cpu and self.num_shards > 1) + 1 / self.num_shards
        peak = sharded = 0.0
        for unit in [*reversed(self.trace.entered), 0]:
            ends = next(
                moment.others
                for moment in self.trace.moments
                if done[moment.num_finished][unit] == done[-1][unit]
            )
            gradient = plan.width * self.reduced[unit]
            if self.accumulated:
                gradient = self.accumulated - 4 * sharded
            buffers = 4 * self.reduced[unit]
            held = ends + self.gathered[0] + self.buffer(self.before.get(unit))
            held += max(gradient + buffers, buffers * copies)
            peak = max(peak, held + 4 * sharded / self.num_shards)
            sharded += self.reduced[unit]
        return peak


def setup(plan: Plan, sizes: Sizes, strategy: Strategy) -> float:
    return plan.arrival([*map(prod, shards_of(plan, sizes["dp_shard"]))])


def shards_of(plan: Plan, num_shards: int) -> list[tuple[int, ...]]:
    """The shapes of one rank's, which are cut along the first dimension."""
    return [(-(-s[0] // num_shards), *s[1:]) if s else () for s in plan.shapes]
