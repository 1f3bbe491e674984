"""A model as predictions see it; each strategy's own is in a module of its own."""

import itertools
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Protocol

from torch import nn

from labkit.estimate.trace import NOTHING
from labkit.estimate.trace import Inputs
from labkit.estimate.trace import Loss
from labkit.estimate.trace import Optimizer
from labkit.estimate.trace import Shapes
from labkit.estimate.trace import Trace
from labkit.estimate.trace import trace_step
from labkit.estimate.trace import trace_update
from labkit.records import COMPONENTS
from labkit.strategies import STRATEGIES as TABLE
from labkit.strategies import Strategy
from labkit.strategies.prepared import DTYPES
from labkit.strategies.prepared import blocks
from labkit.strategies.prepared import units

STRATEGIES = [name for name, each in TABLE.items() if each.forecast]

Memory = dict[str, float]


class Forecast(Protocol):
    """What a module that `Strategy.forecast` names has."""

    def memory(
        self, plan: "Plan", trace: Trace, ranks: int, strategy: Strategy
    ) -> Memory:
        """Bytes of the fullest rank in a step, by component."""

    def setup(self, plan: "Plan", ranks: int, strategy: Strategy) -> float:
        """Bytes at the peak of `prepare`."""


def load(strategy: Strategy) -> Forecast:
    """What predicts the memory of `strategy`."""
    forecast: Forecast = import_module(f"labkit.estimate.{strategy.forecast}")
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
    ) -> None:
        self.accumulate = accumulate
        self.width = DTYPES[precision].itemsize
        """Bytes of an element in what is computed."""
        self.device_type = device.partition(":")[0]
        self.is_cpu = self.device_type == "cpu"
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

    def memory(self, strategy: Strategy, world_size: int, batch_size: int) -> Memory:
        """Bytes of the fullest rank in a step, by component."""
        ranks = 1 if strategy.is_single else world_size
        samples = -(-batch_size // (ranks * self.accumulate))
        key = (samples, strategy.is_partitioned and self.width < 4)
        if key not in self._traces:
            self._traces[key] = self._trace(batch_size=samples, casts_model=key[1])
        return load(strategy).memory(self, self._traces[key], ranks, strategy)

    def setup(self, strategy: Strategy, world_size: int) -> float:
        """Bytes at the peak of `prepare`, in which the model comes a part at a time
        and whole, and is sharded then."""
        ranks = 1 if strategy.is_single else world_size
        return load(strategy).setup(self, ranks, strategy)

    def update(self, shapes: Shapes) -> tuple[int, int]:
        key = tuple(map(tuple, shapes))
        if key not in self._updates:
            self._updates[key] = trace_update(shapes, self._optimizer, self._device)
        return self._updates[key]

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
