"""What each strategy keeps and gathers, added to what a step of the model needs."""

import itertools
from collections.abc import Callable
from functools import partial
from math import prod

from torch import nn

from labkit.estimate.trace import NOTHING
from labkit.estimate.trace import Inputs
from labkit.estimate.trace import Loss
from labkit.estimate.trace import Moment
from labkit.estimate.trace import Optimizer
from labkit.estimate.trace import Shapes
from labkit.estimate.trace import Trace
from labkit.estimate.trace import trace_step
from labkit.estimate.trace import trace_update
from labkit.records import COMPONENTS
from labkit.strategies.fsdp import replicas_and_shards
from labkit.strategies.prepared import DTYPES
from labkit.strategies.prepared import blocks
from labkit.strategies.prepared import units
from labkit.strategies.zero.config import bucket_elements

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")

Memory = dict[str, float]


class Plan:
    """The memory of one model by strategy; steps that are alike are traced once.

    Without inputs it is what there is besides a step's activations and temporaries.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs | None,
        loss_fn: Loss,
        optimizer: Optimizer | None,
        accumulate: int,
        precision: str,
        activation_checkpointing: bool,
        device: str,
    ) -> None:
        self.accumulate = accumulate
        self.width = DTYPES[precision].itemsize
        """Bytes of an element in what is computed."""
        self.is_cpu = device == "cpu"
        self._optimizer = optimizer
        self._device = device
        self._trace: Callable[..., Trace] = lambda **step: NOTHING
        if inputs is not None:
            self._trace = partial(
                trace_step,
                model,
                inputs,
                loss_fn,
                dtype=DTYPES[precision],
                activation_checkpointing=activation_checkpointing,
                device=device,
            )
        self._traces: dict[tuple[int, bool], Trace] = {}
        self._updates: dict[tuple[tuple[int, ...], ...], tuple[int, int]] = {}
        parameters = list(model.parameters())
        self.shapes = [tuple(p.shape) for p in parameters]
        self.sizes = [p.numel() for p in parameters]
        self.trainable = [p.numel() if p.requires_grad else 0 for p in parameters]
        self.buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        separate = set(units(model))
        places = {
            id(parameter): unit
            for unit, block in enumerate(blocks(model), 1)
            if block in separate
            for parameter in block.parameters()
        }
        self.units = [places.get(id(parameter), 0) for parameter in parameters]
        self.num_units = 1 + len(blocks(model))
        self.largest_module = max(
            sum(p.numel() for p in module.parameters(recurse=False))
            for module in model.modules()
        )
        """Elements of the module that has most parameters of its own."""

    def memory(self, strategy: str, world_size: int, batch_size: int) -> Memory:
        ranks = 1 if strategy == "single" else world_size
        samples = -(-batch_size // (ranks * self.accumulate))
        casts = strategy not in ("single", "ddp")
        key = (samples, casts and self.width < 4)
        if key not in self._traces:
            self._traces[key] = self._trace(batch_size=samples, casts_model=key[1])
        trace = self._traces[key]
        if strategy in ("single", "ddp"):
            return self.replicated(trace, in_place=strategy == "ddp")
        if strategy in ("zero1", "zero2"):
            return self.zero(trace, ranks, stage=int(strategy[-1]))
        if strategy == "zero3":
            return self.zero3(trace, ranks)
        _, num_shards = replicas_and_shards(ranks) if strategy == "hsdp" else (1, ranks)
        return self.fsdp(trace, num_shards)

    def setup(self, strategy: str, world_size: int) -> float:
        """Bytes at the peak of `prepare`, in which the model comes a part at a time
        and whole, and is sharded then.

        Source: `labkit.strategies.model.materialize`, `labkit.strategies.zero.setup`.
        """
        if strategy in ("single", "ddp"):
            buckets = 4.0 * sum(self.trainable) * (strategy == "ddp")
            return 4.0 * sum(self.sizes) + self.buffers + buckets
        if strategy in ("fsdp", "hsdp"):
            num_shards = world_size
            if strategy == "hsdp":
                _, num_shards = replicas_and_shards(world_size)
            whole, shards = [0.0] * self.num_units, [0.0] * self.num_units
            for shape, unit, size in zip(
                self.shapes, self.units, self.sizes, strict=True
            ):
                whole[unit] += 4 * size
                rows = max((1, *shape[:1]))
                shards[unit] += 4 * size / rows * -(-rows // num_shards)
            # The root comes last.
            order = [*range(1, self.num_units), 0]
            kept = itertools.accumulate(shards[unit] for unit in order)
            peaks = (k + whole[u] for k, u in zip(kept, order, strict=True))
            return self.buffers + max(peaks)
        # A trained parameter comes in fp32, also if it is rounded then. DeepSpeed makes
        # its copy in fp32 twice.
        width = self.width
        rounded = max(self.trainable) * (4.0 + width) * (width < 4)
        part = -(-sum(self.trainable) // world_size)
        if strategy == "zero3":
            own = width * sum(-(-size // world_size) for size in self.sizes)
            most = max(rounded, width * max(self.sizes), 8.0 * part)
            return own + self.buffers + most
        whole_model = width * sum(self.sizes) + self.buffers
        return whole_model + max(rounded - width * max(self.trainable), 8.0 * part)

    def update(self, shapes: Shapes) -> tuple[int, int]:
        key = tuple(map(tuple, shapes))
        if key not in self._updates:
            self._updates[key] = trace_update(shapes, self._optimizer, self._device)
        return self._updates[key]

    def trainable_of(self, shapes: Shapes) -> Shapes:
        pairs = zip(shapes, self.trainable, strict=True)
        return [shape for shape, is_trainable in pairs if is_trainable]

    def replicated(self, trace: Trace, *, in_place: bool) -> Memory:
        """One process, or DDP, whose gradients stay in its buckets."""
        whole = 4.0 * sum(self.trainable)
        state, temporaries = self.update(self.trainable_of(self.shapes))
        kept = 4.0 * sum(self.sizes) + self.buffers
        so_far = self.finished_bytes(trace, 4)
        is_whole = in_place or self.accumulate > 1

        def gradients(moment: Moment) -> float:
            return whole if is_whole else so_far[moment.num_finished]

        return self.components(
            trace,
            parameters=kept,
            gradients=whole,
            optimizer_state=state,
            total_peak=kept + state + max(trace.peak(gradients), whole + temporaries),
        )

    def fsdp(self, trace: Trace, num_shards: int) -> Memory:
        """Shards, and the whole of the block at work and of the root.

        Forward: a block is gathered in one buffer and copied out of it; the buffer
        stays until the next block's. Backward: the next block is gathered meanwhile;
        the gradients are copied to a buffer that stays until the next one's.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group`.
        """
        shards = [(-(-s[0] // num_shards), *s[1:]) if s else () for s in self.shapes]
        state, temporaries = self.update(self.trainable_of(shards))
        kept = 4.0 * sum(map(prod, shards)) + self.buffers
        is_sharded = num_shards > 1
        padded = [0.0] * self.num_units  # elements, with the shards' padding
        reduced = [0.0] * self.num_units
        for shard, unit, size in zip(shards, self.units, self.trainable, strict=True):
            padded[unit] += prod(shard) * num_shards
            reduced[unit] += prod(shard) * num_shards if size else 0
        gathered = [self.width * elements for elements in padded]
        buffer = [is_sharded * each for each in gathered]
        # gloo reduces in a copy of its own.
        copies = 1 + (self.is_cpu and is_sharded)
        whole = 4.0 * sum(self.trainable)
        kept_whole = whole if self.accumulate > 1 else 0.0
        before = self.neighbours(trace)
        after = {there: here for here, there in before.items()}
        by_unit = self.finished_by_unit(trace)

        def gathering(moment: Moment) -> float:
            unit = moment.unit
            if not moment.is_backward:
                entered = unit or max(trace.entered, default=0)
                total = gathered[0] + buffer[entered]
                return total + (gathered[unit] if unit else 0) + kept_whole
            done = by_unit[moment.num_finished]
            total = gathered[0] + self.width * done[0]
            # Of blocks that are through there are shards, of this one the whole.
            for other in range(1, self.num_units):
                if other == unit:
                    total += self.width * done[other]
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
                gradient = self.width * reduced[unit]
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
        return self.components(
            trace,
            parameters=kept,
            gradients=kept_whole or own,
            optimizer_state=state,
            communication_buffers=gathered[0] + max([0.0, *gathered[1:]]),
            total_peak=kept + state + max(peak, own + temporaries),
        )

    def zero(self, trace: Trace, ranks: int, *, stage: int) -> Memory:
        """Whole parameters, a part of what updates them, and a bucket of gradients.

        Gradients are copied to the bucket, to be reduced; those of the parameters that
        a rank's part touches go on to a buffer, and in the step become a flat part in
        fp32. Stage 2 does so within the backward pass, stage 1 after it.

        Source: `deepspeed.runtime.zero.stage_1_and_2`.
        """
        width = self.width
        total = sum(self.trainable)
        part = -(-total // (2 * ranks)) * 2
        state, temporaries = self.update([(part,)])
        bucket = bucket_elements(sum(self.sizes))
        own = width * self.touched(part, ranks)
        kept = width * sum(self.sizes) + self.buffers + state + 4.0 * part
        sizes = [0, *(self.trainable[index] for index in trace.finished)]
        so_far = list(itertools.accumulate(sizes))
        # What earlier microbatches of the step have left.
        earlier = 0.0
        if self.accumulate > 1:
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
        return self.components(
            trace,
            parameters=width * sum(self.sizes) + self.buffers,
            gradients=width * total if stage == 1 else own,
            optimizer_state=state,
            master_parameters=4.0 * part,
            communication_buffers=width * bucket,
            total_peak=kept + peak,
        )

    def zero3(self, trace: Trace, ranks: int) -> Memory:
        """A part of everything, and what is gathered of the parameters.

        A module's parameters are gathered for its forward and its backward pass, and
        as many as a bucket holds ahead of it. The bucket of gradients is always there;
        to be reduced, they are copied.

        Source: `deepspeed.runtime.zero.partitioned_param_coordinator` and `stage3`.
        """
        width = self.width
        own = sum(-(-size // ranks) for size in self.sizes)
        part = sum(-(-size // ranks) for size in self.trainable)
        state, temporaries = self.update([(part,)])
        bucket = bucket_elements(sum(self.sizes))
        alive = min(sum(self.sizes), self.largest_module + bucket)
        kept = width * (own + part + bucket) + self.buffers + state + 4.0 * part
        sizes = [0, *(self.trainable[index] for index in trace.finished)]
        copies = 1 + self.is_cpu  # gloo reduces in a copy of its own

        def gathering(moment: Moment) -> float:
            size = sizes[moment.num_finished]
            return width * (alive + copies * size * (size > bucket))

        reduce = width * (copies * bucket + alive) + trace.moments[-1].others
        return self.components(
            trace,
            parameters=width * own + self.buffers,
            gradients=width * part,
            optimizer_state=state,
            master_parameters=4.0 * part,
            communication_buffers=width * (bucket + alive),
            total_peak=kept
            + max(trace.peak(gathering), reduce, 4 * part + temporaries),
        )

    def components(self, trace: Trace, **found: float) -> Memory:
        zeros = dict.fromkeys(COMPONENTS, 0.0)
        return {**zeros, "activations_peak": trace.activations, **found}

    def touched(self, part: int, ranks: int) -> int:
        """Elements of all parameters that a rank's part of the flat whole touches, on
        the rank where they are most."""
        ends = list(itertools.accumulate(self.trainable))
        return max(
            sum(
                size
                for end, size in zip(ends, self.trainable, strict=True)
                if end > rank * part and end - size < (rank + 1) * part
            )
            for rank in range(ranks)
        )

    def finished_bytes(self, trace: Trace, width: int) -> list[float]:
        """Bytes of complete gradients, by how many there are."""
        totals = [0.0]
        for index in trace.finished:
            totals.append(totals[-1] + width * self.trainable[index])
        return totals

    def finished_by_unit(self, trace: Trace) -> list[list[float]]:
        """Elements of complete gradients, by how many there are and by block."""
        totals = [[0.0] * self.num_units]
        for index in trace.finished:
            row = list(totals[-1])
            row[self.units[index]] += self.trainable[index]
            totals.append(row)
        return totals

    def neighbours(self, trace: Trace) -> dict[int, int]:
        """For each block the one before it in the forward pass."""
        return {here: there for there, here in itertools.pairwise(trace.entered)}
