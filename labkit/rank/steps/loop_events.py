"""What the cell's loop does, handed on to all that a run has for it."""

import contextlib
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import ClassVar

import torch

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import Overflows
from labkit.compat.torch import Unscale
from labkit.rank.data.dealing import GlobalBatches
from labkit.rank.data.dealing import Share
from labkit.rank.data.dealing import Stream
from labkit.rank.data.loader import RankLoader
from labkit.rank.loop.run_records import RunRecords
from labkit.rank.loop.step_data import StepData
from labkit.rank.loss.hooks import Loss
from labkit.rank.loss.hooks import LossHooks
from labkit.rank.steps.observers import Observer
from labkit.rank.steps.observers import listening
from labkit.rank.steps.optimizer import PreparedOptimizer
from labkit.rank.steps.stop_point import StoppedAtStep
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Prepared

OF_A_FORMER_RUN = (
    "the loop draws a batch from a loader that an earlier run prepared, and ranks' "
    "parts of it are unequal, or microbatches, or weigh counts them; this run weights "
    "losses by the batches of its own loader alone. Use the loader that prepare "
    "returns in this cell, to which the earlier one may be given: prepare(model, "
    "optimizer, loader). To evaluate with it, draw from it under torch.no_grad()"
)


class LoopEvents:
    """The passes, batches, backward passes and steps of one run's loop, in the order in
    which optimizers, observers and records hear of each."""

    _last: ClassVar["weakref.ref[LoopEvents] | None"] = None
    """Those of the last run that has begun."""

    def __init__(
        self,
        hooks: LossHooks,
        data: StepData,
        records: RunRecords,
        *,
        observers: Sequence[Observer],
        optimizers: Sequence[PreparedOptimizer],
        stop: Callable[[], None],
    ) -> None:
        """`optimizers` are those of `prepare`, as they come; `stop()` is called before
        StoppedAtStep leaves the loop."""
        self.has_passed = False
        """Whether there was a backward pass."""
        self.has_ended = False
        """Whether the run has, and its loaders may be in another cell's hands."""
        self._former: list[weakref.ref[Prepared]] = []
        """What it had prepared."""
        LoopEvents._last = weakref.ref(self)
        self._hooks = hooks
        self._data = data
        self._records = records
        self._observers = observers
        self._optimizers = optimizers
        self._stop = stop
        # Found once: a step has ten events, and all of this is time of the loop.
        self._at_boundary = listening(observers, "between_steps")
        self._at_microbatch = listening(observers, "begin_microbatch")
        self._at_backward = listening(observers, "begin_backward")
        self._after_backward = listening(observers, "end_backward")
        self._at_step = listening(observers, "begin_step")
        self._after_each_step = listening(observers, "optimizer_stepped")
        self._after_step = listening(observers, "step_taken")
        hooks.on_backward_begins = self._begin_backward
        hooks.on_backward_ends = self._end_backward
        hooks.on_step_begins = self._begin_step
        hooks.on_step = self._end_step
        hooks.unscale = self._unscale

    # ---- of a loader of `prepare` ----

    def begin_epoch(self, epoch: int, batches: GlobalBatches | Stream) -> None:
        self._data.begin_epoch()
        for optimizer in self._optimizers:
            if not self.has_ended:
                optimizer.prepared.course.begin_pass()
            optimizer.drop_held()
        for observer in self._observers:
            observer.begin_epoch()
        self._records.note_progress(epoch=epoch)
        with contextlib.suppress(TypeError):  # a sampler or stream without a length
            self._records.note_progress(steps_per_epoch=batches.num_batches)

    def before_batch(self, loader: RankLoader) -> None:
        if not self.has_ended:
            for optimizer in self._optimizers:
                optimizer.prepared.course.ask()
            self._data.ask(loader)
            self._between_steps(loader)

    def begin_batch(self, share: Share, loader: RankLoader) -> None:
        if self.has_ended:
            self._leave_unweighted(share.weight)
            return
        self._data.give(share, loader)
        for optimizer in self._optimizers:
            optimizer.prepared.loss_weight = share.weight
            optimizer.prepared.course.begin_batch(
                share.num_samples,
                is_even=share.is_even or optimizer.prepared.acts_alone,
            )
            optimizer.begin_microbatch(share.is_last)
        number = self._records.num_steps + 1 - self._records.first_step
        for begin in self._at_microbatch:
            begin(number)

    def end_epoch(self) -> None:
        if self.has_ended:
            self._leave_unweighted(1.0)
        self._data.end_epoch()
        for optimizer in self._optimizers:
            if not self.has_ended:
                optimizer.prepared.course.end_pass()
        for observer in self._observers:
            observer.end_epoch()

    def end(self) -> None:
        """The run ends. From now on no backward pass is weighted by its batch."""
        self.has_ended = True
        for optimizer in self._optimizers:
            optimizer.prepared.loss_weight = 1.0
            self._former.append(weakref.ref(optimizer.prepared))

    def _leave_unweighted(self, weight: float) -> None:
        """Another cell has a batch whose loss would need this weight: what it trains is
        told so.

        UnsupportedLoopError where a later run would train with the batch."""
        if weight != 1 and torch.is_grad_enabled():
            last = LoopEvents._last and LoopEvents._last()
            if last and not last.has_ended and last._optimizers:
                raise UnsupportedLoopError(OF_A_FORMER_RUN)
        for each in self._former:
            if (prepared := each()) is not None:
                prepared.loss_weight = weight

    # ---- of an optimizer of `prepare` ----

    def take_step(self, optimizer: PreparedOptimizer, closure: Closure | None) -> None:
        step = optimizer.prepared.step
        norm = self._hooks.step(optimizer, lambda: step(closure))
        self._data.take_gradients()
        if norm is not None:
            self._records.put("gradient_norm", norm)
        for name, value in optimizer.prepared.metrics().items():
            self._records.put(name, value)

    def zero_gradients(self) -> None:
        if len(self._optimizers) == 1:  # or others may be about to take them
            self._data.zero_gradients()

    # ---- of any loop ----

    def _begin_backward(self) -> None:
        self.has_passed = True
        self._data.begin_backward(is_prepared=bool(self._optimizers))
        for optimizer in self._optimizers:
            optimizer.begin_backward()
        for begin in self._at_backward:
            begin()

    def _end_backward(self, has_failed: bool) -> None:
        for end in self._after_backward:
            end()
        for optimizer in self._optimizers:
            optimizer.prepared.course.end_backward()
            optimizer.end_backward(has_failed=has_failed)

    def _begin_step(self) -> None:
        """Of an optimizer that is none of `prepare`'s."""
        for begin in self._at_step:
            begin()

    def _end_step(self, loss: Loss | None, number: int) -> None:
        """The optimizer of this number has taken a step."""
        for see in self._after_each_step:
            see(number)
        is_next = self._records.count_step(loss, number, self._data.take_counts)
        if not is_next:
            return
        for see in self._after_step:
            see(self._records.num_steps)
        if self._data.is_own:
            self._between_steps()

    def _unscale(self, optimizer: Any, take: Unscale) -> Overflows:
        for each in self._optimizers:
            if optimizer is each or optimizer is each.prepared.optimizer:
                return each.prepared.unscale(take)
        return take(optimizer)

    def _between_steps(self, loader: RankLoader | None = None) -> None:
        """Between two steps, where every rank can stop."""
        try:
            for stop_or_save in self._at_boundary:
                stop_or_save(self._records.num_steps, loader)
        except StoppedAtStep:
            self._stop()
            raise
