"""A model as predictions see it; each strategy's own is in a module of its own."""

import itertools
from collections.abc import Callable
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Protocol

from torch import nn

from labkit.estimate.rows import Row
from labkit.estimate.rows import Sizes
from labkit.estimate.trace import NOTHING
from labkit.estimate.trace import Inputs
from labkit.estimate.trace import Loss
from labkit.estimate.trace import Optimizer
from labkit.estimate.trace import Shapes
from labkit.estimate.trace import Trace
from labkit.estimate.trace import trace_step
from labkit.estimate.trace import trace_update
from labkit.records import COMPONENTS
from labkit.strategies import Strategy
from labkit.strategies.prepared import DTYPES
from labkit.strategies.prepared import blocks
from labkit.strategies.prepared import units
from labkit.strategies.relay.stages import Stages

Memory = dict[str, float]


class Forecast(Protocol):
    """What a module that `Strategy.forecast` names has."""

    def memory(
        self, plan: "Plan", samples: int, sizes: Sizes, strategy: Strategy
    ) -> Memory:
        """Bytes of the fullest rank in a step, by component, with so many samples at
        a time, on a mesh of these sizes."""

    def setup(self, plan: "Plan", sizes: Sizes, strategy: Strategy) -> float:
        """Bytes at the peak of `prepare`."""


def load(strategy: Strategy) -> Forecast:
    """What predicts the memory of `strategy`."""
    place = f"labkit.estimate.techniques.{strategy.forecast}"
    forecast: Forecast = import_module(place)
    return forecast


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
        *,
        updates_together: bool = True,
    ) -> None:
        """Without `updates_together` the optimizer takes one parameter after the
        other, also where it would take all at once."""
        self.model = model
        self.divided: dict[int, Plan] = {}
        """Those of this model's parts, by their number."""
        self._given = (
            *(inputs, loss_fn, optimizer, accumulate, precision),
            *(activation_checkpointing, device),
        )
        self._updates_together = updates_together
        self.accumulate = accumulate
        self.width = DTYPES[precision].itemsize
        """Bytes of an element in what is computed."""
        self.device_type = device
        self.is_cpu = device == "cpu"
        self._optimizer = optimizer
        self._trace: Callable[..., list[Trace]] = lambda **step: [NOTHING]
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
        self._stages: dict[tuple[int, int], list[Trace]] = {}
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
            sum(p.numel() for _, p in module.named_parameters(recurse=False))
            for module in model.modules()
        )
        """Elements of the module that has most parameters of its own."""

    def of_part(self, model: nn.Module) -> "Plan":
        """The same step of `model`, a rank's part of this one."""
        return Plan(model, *self._given, updates_together=False)

    def memory(self, row: Row, batch_size: int) -> Memory:
        """Bytes of the fullest rank in a step, by component."""
        samples = -(-batch_size // (row.num_shares * self.accumulate))
        return load(row.strategy).memory(self, samples, row.sizes, row.strategy)

    def setup(self, row: Row) -> float:
        """Bytes at the peak of `prepare`, in which the model comes a part at a time
        and whole, and is sharded then."""
        return load(row.strategy).setup(self, row.sizes, row.strategy)

    def trace(self, samples: int, *, casts_model: bool = False) -> Trace:
        """A step of `samples`. Below fp32 either the model is cast, or its operators
        are (autocast)."""
        key = (samples, casts_model and self.width < 4)
        if key not in self._traces:
            [self._traces[key]] = self._trace(batch_size=samples, casts_model=key[1])
        return self._traces[key]

    def trace_stages(self, samples: int, stages: Stages) -> list[Trace]:
        """A step of `samples`, as each of `stages` sees it."""
        key = (samples, stages.num_stages)
        if key not in self._stages:
            stage_of = dict(zip(stages.names, stages.stage_of, strict=True))
            found = self._trace(
                batch_size=samples, casts_model=False, stage_of=stage_of
            )
            is_known = len(found) > 1  # else without input
            self._stages[key] = found if is_known else found * stages.num_stages
        return self._stages[key]

    def update(self, shapes: Shapes) -> tuple[int, int]:
        key = tuple(map(tuple, shapes))
        if key not in self._updates:
            self._updates[key] = trace_update(
                shapes,
                self._optimizer,
                self.device_type,
                together=self._updates_together,
            )
        return self._updates[key]

    def arrival(self, kept: Sequence[float]) -> float:
        """Bytes at the peak where a block comes whole, and its parameters leave so
        many elements each before the next one comes.

        Source: `labkit.strategies.model.materialize`.
        """
        whole, parts = [0.0] * self.num_units, [0.0] * self.num_units
        for unit, size, rest in zip(self.units, self.sizes, kept, strict=True):
            whole[unit] += 4 * size
            parts[unit] += 4 * rest
        order = [*range(1, self.num_units), 0]  # the root comes last
        so_far = itertools.accumulate(parts[unit] for unit in order)
        peaks = (k + whole[u] for k, u in zip(so_far, order, strict=True))
        return self.buffers + max(peaks)

    def trainable_of(self, shapes: Shapes) -> Shapes:
        pairs = zip(shapes, self.trainable, strict=True)
        return [shape for shape, is_trainable in pairs if is_trainable]

    def components(self, trace: Trace, **found: float) -> Memory:
        zeros = dict.fromkeys(COMPONENTS, 0.0)
        return {**zeros, "activations_peak": trace.activations, **found}

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
