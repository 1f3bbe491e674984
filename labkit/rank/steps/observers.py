"""What watches a run: every observer sees the same events, and keeps its own."""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Sequence
from typing import Any

import torch

from labkit import timeouts
from labkit.checks import slow_rank
from labkit.rank.data.loader import RankLoader
from labkit.rank.measuring.step_profiler import Noticed
from labkit.rank.measuring.step_profiler import StepProbe
from labkit.rank.measuring.step_profiler import Trained
from labkit.rank.measuring.step_profiler import hindrance
from labkit.rank.measuring.step_profiler import is_sampled
from labkit.rank.steps.optimizer import PreparedOptimizer
from labkit.rank.telemetry.replica_fingerprints import ReplicaWatch
from labkit.records import Averages

UNMEASURED = "memory and collectives were not measured in the remaining steps: "
GIVE_UP_STEPS = 100
"""A step is not measured any more after so many times as long as the one before it
took: to measure may take many times as long as to train."""


class Observer:
    """The events of a run, in the main thread of its rank. To inherit: what is not
    written does nothing."""

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Entered for as long as the cell runs."""
        return contextlib.nullcontext()

    def begin_epoch(self) -> None:
        """A loader begins a pass."""

    def between_steps(self, step: int, loader: RankLoader | None = None) -> None:
        """`step` steps are taken, on all ranks; before `loader` gives a batch, if the
        loop takes its batches from one."""

    def begin_microbatch(self, number: int) -> None:
        """The loop has a batch, or a part of one, of the run's step of this number,
        counted from 1."""

    def begin_backward(self) -> None:
        """A backward pass begins."""

    def end_backward(self) -> None:
        """It has ended, or failed."""

    def begin_step(self) -> None:
        """An optimizer of the cell's own begins a step."""

    def optimizer_stepped(self, number: int) -> None:
        """The run's optimizer of this number has taken a step."""

    def step_taken(self, step: int) -> None:
        """The run has taken `step` steps: as many as the optimizer that has taken
        most."""

    def end_epoch(self) -> None:
        """A loader has no more batches."""

    def end(self, step: int) -> None:
        """The code of the cell has ended, well or not, after `step` steps."""

    def close(self) -> None:
        """Nothing of the run is needed any more."""


def listening(observers: Sequence[Observer], event: str) -> list[Callable[..., None]]:
    """What observers do at an event, in their order: there are several in every step,
    and most observers wait for a few of them."""
    ignored = getattr(Observer, event)
    return [
        getattr(each, event)
        for each in observers
        if getattr(type(each), event) is not ignored
    ]


class StepSampler(Observer):
    """Measures memory and collectives in some of a run's steps.

    A step of a loop that has its batches from labkit is measured from its first batch
    on, until all of the loop's optimizers have stepped or it asks for another batch;
    one of a loop that does all by itself from the end of the step before.
    """

    def __init__(
        self,
        optimizers: Sequence[PreparedOptimizer],
        device: torch.device,
        *,
        noticed: Callable[[], list[torch.optim.Optimizer]],
        report: Callable[[Any], None],
        note: Callable[[str], None],
        left_out: Container[int] = (),
    ) -> None:
        """`optimizers` are those of `prepare`, as they come; `noticed()` those that
        have taken a step, or are prepared. Steps that are `left_out` are not measured:
        one after them is."""
        self._left_out = left_out
        self._optimizers = optimizers
        self._noticed = noticed
        self._device = device
        self._report = report
        self._note = note
        self._probe: StepProbe | None = None
        self._is_by_hand = False
        """Whether what is measured is a step of a loop that does all by itself."""
        self._stepped: set[int] = set()
        """The optimizers that have, in the step that is measured."""
        self.peak_bytes = 0
        """What tensors held at most in the step that was measured last."""
        self._step = 1
        """Which one is next."""
        self._is_due = False
        self._hindrance = ""
        """Why the one that is due is not measured yet, in words."""
        self._began: float | None = None
        """When the step did; None in the first of an epoch."""
        self._seconds = math.inf
        """That the one before it took, where that is known."""

    def between_steps(self, step: int, loader: RankLoader | None = None) -> None:
        self._step = step + 1
        if self._probe is not None and self._probe.has_given_up:
            self._stop(is_complete=False)
        self._stop_after_steps()
        if self._began is not None:
            self._began = time.perf_counter()  # after what others do here

    def begin_microbatch(self, number: int) -> None:
        if self._probe is not None:
            self._probe.begin_forward()
        elif self._is_to_measure(number):
            self._begin([each.prepared for each in self._optimizers])

    def _is_to_measure(self, number: int) -> bool:
        """Whether a step is to be measured: this one is sampled, or one from which on a
        strategy sends another number of bytes; or one before it, which could not be."""
        if is_sampled(number):
            self._is_due = True
        for each in self._optimizers:
            if number in each.prepared.steps_to_measure:
                self._is_due = True
        return self._is_due and self._step not in self._left_out

    def _begin(self, trained: Sequence[Trained]) -> None:
        """Measure the step that is due, unless something is in the way."""
        self._hindrance = hindrance()
        if self._hindrance:
            return
        self._is_due = False
        self._probe = StepProbe(
            trained,
            self._device,
            step=self._step,
            began=self._began,
            give_up_s=max(timeouts.GIVE_UP_S, GIVE_UP_STEPS * self._seconds),
        )
        self._probe.start()

    def begin_backward(self) -> None:
        if self._probe is not None:
            self._probe.begin_backward()

    def end_backward(self) -> None:
        if self._probe is not None:
            self._probe.end_backward()

    def begin_step(self) -> None:
        if self._probe is not None:
            self._probe.begin_step()

    def optimizer_stepped(self, number: int) -> None:
        if self._probe is None:
            return
        self._stepped.add(number)
        if self._is_by_hand or len(self._stepped) < len(self._noticed()):
            self._probe.end_step()
        else:
            self._stop(is_complete=True)

    def _stop_after_steps(self) -> None:
        """A loop with several optimizers has taken a step with some of them, and those
        of the others are of other steps."""
        if self._stepped and not self._is_by_hand:
            self._stop(is_complete=True)

    def step_taken(self, step: int) -> None:
        now = time.perf_counter()
        self._step = step + 1
        if self._began is not None:
            self._seconds = now - self._began
        self._began = now
        if self._is_by_hand:  # all of its optimizers have stepped since it began
            self._stop(is_complete=True)
        if (
            self._probe is None
            and not self._optimizers
            and self._is_to_measure(step + 1)
        ):
            self._begin([Noticed(self._noticed)])
            self._is_by_hand = self._probe is not None

    def end_epoch(self) -> None:
        self._stop_after_steps()
        self._began = None

    def end(self, step: int) -> None:
        if self._is_due and self._probe is None and self._hindrance:
            self._note(UNMEASURED + self._hindrance)
        self._report_averages()

    def close(self) -> None:
        self._stop(is_complete=False)

    def _stop(self, *, is_complete: bool) -> None:
        if self._probe is None:
            return
        if not self._probe.stop():
            return  # more than a step will have passed when it ends
        probe, self._probe, self._is_by_hand = self._probe, None, False
        self._stepped.clear()
        if is_complete and (measured := probe.measurement()) is not None:
            self.peak_bytes = measured.memory["total_peak"]
            self._report(measured)
            self._report_averages()

    def _report_averages(self) -> None:
        """What went between steps, or in steps that were not measured."""
        found = [each.prepared.averages() for each in self._optimizers]
        if sent := [each for each in found if each is not None]:
            self._report(functools.reduce(Averages.plus, sent))


class ReplicaObserver(Observer):
    """Compares what ranks hold replicas of, and the samples that they draw."""

    def __init__(
        self,
        optimizers: Sequence[PreparedOptimizer],
        *,
        report: Callable[[Any], None],
        num_backwards: Callable[[], int],
        left_out: Container[int] = (),
    ) -> None:
        """`num_backwards()` so far. After steps that are `left_out` nothing is
        compared."""
        self._left_out = left_out
        self.watch = ReplicaWatch()
        self._optimizers = optimizers
        self._report = report
        self._num_backwards = num_backwards

    def watching(self) -> contextlib.AbstractContextManager[None]:
        return self.watch.watching_loaders(self._num_backwards)

    def begin_epoch(self) -> None:
        self.watch.is_dealt = True

    def step_taken(self, step: int) -> None:
        if not self._optimizers:
            return  # of `prepare`: nothing is known to be a replica
        if self.watch.is_due(step) and step not in self._left_out:
            self._check(step)

    def end(self, step: int) -> None:
        self._check(step)
        self._report(self.watch.notes(step))

    def _check(self, step: int) -> None:
        for each in self._optimizers:
            if not each.prepared.is_one_model:
                return
        replicas: dict[str, torch.Tensor] = {}
        for number, each in enumerate(self._optimizers):
            of_which = f" of model {number + 1}" if number else ""
            found = each.prepared.replicas() | each.forward_state.replicas
            for name, tensor in found.items():
                replicas[name + of_which] = tensor
        self.watch.check(step, replicas)


class Slowing(Observer):
    """Sleeps after each backward pass of this rank, so that forward and backward pass
    together take `factor` times as long as they did.

    On a CPU that is the time in which this rank computed: what it waited for others,
    as DDP does within the backward pass, is theirs.
    """

    def __init__(self, factor: float, device: torch.device) -> None:
        self._factor = factor
        is_cpu = device.type == "cpu"
        self._clock = time.thread_time if is_cpu else time.perf_counter
        self._began: float | None = None

    def begin_microbatch(self, number: int) -> None:
        self._began = self._clock()

    def begin_backward(self) -> None:
        if self._began is None:  # the loop takes its batches from elsewhere
            self._began = self._clock()

    def end_backward(self) -> None:
        if self._began is not None:
            time.sleep((self._factor - 1.0) * (self._clock() - self._began))
            self._began = self._clock()

    def step_taken(self, step: int) -> None:
        self._began = self._clock()


def slowing_of(slow: str | None, rank: int, device: torch.device) -> list[Slowing]:
    """What makes this rank slow, if `--slow` says so."""
    if slow is None:
        return []
    which, factor = slow_rank(slow)
    return [Slowing(factor, device)] if which == rank else []
