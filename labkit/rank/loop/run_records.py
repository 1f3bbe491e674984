"""The records of one rank's run: its steps are counted here."""

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import torch

from labkit.rank.loop.arguments import type_and_value
from labkit.rank.loss.hooks import Loss
from labkit.rank.loss.hooks import snapshot
from labkit.rank.telemetry.emitter import Emitter
from labkit.records import LOSS_WEIGHT
from labkit.records import NOTES
from labkit.records import NOTICED_LOSS
from labkit.records import PROGRESS
from labkit.records import STEP_TAKEN

RESERVED = frozenset(
    {
        *("rank", "seconds", "memory_bytes", "samples", "tokens", LOSS_WEIGHT),
        *NOTES,
        *(NOTICED_LOSS, STEP_TAKEN),
    }
)


class RunRecords:
    """Sends what a run logs, and what is noticed of its steps."""

    def __init__(self, emitter: Emitter, read_memory: Callable[[], int]) -> None:
        """`read_memory()` gives the bytes that tensors hold."""
        self._emitter = emitter
        self._read_memory = read_memory
        self.num_steps = 0
        """Taken so far, those before a checkpoint that the run resumes from too."""
        self.first_step = 0
        """Optimizer steps that were taken before this run."""
        self.has_logged = False
        """Whether the cell has called `log`."""
        self._steps_by_optimizer: Counter[int] = Counter()
        self._log_calls: dict[str, int] = {}
        self._progress: dict[str, int] = {}
        self._sums_losses = False
        self._loss_sum: Loss = 0.0
        self._weight_sum = 0.0

    def put(self, name: str, value: Loss, step: int | None = None) -> None:
        """Send one; of the step taken last unless `step` says otherwise."""
        at = self.num_steps if step is None else step
        self._emitter.put(name, value, at, self._read_memory())

    def resume(self, first_step: int) -> None:
        """Begin to count at `first_step`, if no step was taken yet."""
        self.first_step = first_step
        if not self.num_steps:
            self.num_steps = first_step

    def count_step(
        self, loss: Loss | None, number: int, counts: Callable[[], Mapping[str, float]]
    ) -> bool:
        """The optimizer of this number has taken a step, with this loss; whether that
        is another step of the run, which has taken as many as the optimizer that has
        taken most. `counts()` are then those of its data."""
        self._steps_by_optimizer[number] += 1
        taken = self._steps_by_optimizer[number] + self.first_step
        is_next = taken > self.num_steps
        self.num_steps = max(self.num_steps, taken)
        if loss is None:
            found: dict[str, Loss] = {STEP_TAKEN: taken}
        else:
            found = {f"loss {number + 1}" if number else NOTICED_LOSS: loss}
        if is_next:
            found.update(step_counts := counts())
            if loss is not None and self._sums_losses:
                weight = float(
                    step_counts.get(LOSS_WEIGHT, step_counts.get("samples", 1))
                )
                # Many of a loss in half precision would be rounded away, or overflow.
                exact = loss if isinstance(loss, float) else loss.double()
                self._loss_sum += weight * exact
                self._weight_sum += weight
        self._emitter.put_all(found, taken, self._read_memory())
        return is_next

    def sum_losses(self, does: bool) -> None:
        """Whether losses are summed up from here on, for `take_loss`."""
        self._sums_losses = does
        self._loss_sum = self._weight_sum = 0.0

    def take_loss(self) -> tuple[float, float]:
        """The mean of this rank's losses since it was last taken, each by its weight,
        and the sum of the weights; NaN and 0 where there were none."""
        total, weight = float(self._loss_sum), self._weight_sum
        self._loss_sum = self._weight_sum = 0.0
        return total / weight if weight else math.nan, weight

    def log(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """What a cell logs; ValueError for what is no scalar."""
        self.has_logged = True
        memory_bytes = self._read_memory()
        for name, value in metrics.items():
            if step is not None:
                at = step
            elif self.num_steps:
                at = self.num_steps
            else:
                at = self._log_calls.get(name, 0)
                self._log_calls[name] = at + 1
            try:
                if isinstance(value, torch.Tensor) and value.is_complex():
                    raise TypeError
                scalar = snapshot(value)
            except (ArithmeticError, TypeError, ValueError, RuntimeError):
                raise ValueError(
                    f"log({name}=...) takes a number or a tensor of one element; "
                    f"found {type_and_value(value)}"
                ) from None
            self._emitter.put(name, scalar, at, memory_bytes)

    def note_progress(self, **changes: int) -> None:
        """Send what changed of `records.Progress`."""
        for field, value in changes.items():
            if self._progress.get(field) != value:
                self._progress[field] = value
                self.put(PROGRESS[field], value)
