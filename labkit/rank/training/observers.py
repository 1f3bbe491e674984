"""What watches a run: every observer sees the same events, and keeps its own."""

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch

from labkit.compat.torch import is_profiled
from labkit.rank.data.loader import RankLoader
from labkit.rank.measuring.step_profiler import Noticed
from labkit.rank.measuring.step_profiler import StepProbe
from labkit.rank.measuring.step_profiler import Trained
from labkit.rank.measuring.step_profiler import may_enter_mode
from labkit.rank.telemetry.replica_fingerprints import ReplicaWatch
from labkit.rank.training.optimizer import PreparedOptimizer
from labkit.strategies.prepared import Prepared

UNMEASURED = (
    "memory and collectives were not measured in the remaining steps: a profiler "
    "is active and would record labkit's own measurement"
)


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

    def optimizer_stepped(self) -> None:
        """One of the run's optimizers has taken a step."""

    def step_taken(self, step: int) -> None:
        """The run has taken `step` steps: as many as the optimizer that has taken
        most."""

    def end_epoch(self) -> None:
        """A loader has no more batches."""

    def end(self, step: int) -> None:
        """The code of the cell has ended, well or not, after `step` steps."""

    def close(self) -> None:
        """Nothing of the run is needed any more."""


class StepSampler(Observer):
    """Measures memory and collectives in some of a run's steps.

    A step of a loop that has its batches from labkit is measured from its first batch
    on, one of a loop that does all by itself from the end of the step before.
    """

    def __init__(
        self,
        prepared: Callable[[], list[Prepared]],
        device: torch.device,
        *,
        noticed: Callable[[], list[torch.optim.Optimizer]],
        report: Callable[[Any], None],
        note: Callable[[str], None],
    ) -> None:
        """`noticed()` are the optimizers that have taken a step."""
        self._prepared = prepared
        self._noticed = noticed
        self._device = device
        self._report = report
        self._note = note
        self._probe: StepProbe | None = None
        self._is_by_hand = False
        """Whether what is measured is a step of a loop that does all by itself."""
        self._is_spoiled = False
        self.peak_bytes = 0
        """What tensors held at most in the step that was measured last."""
        self._step = 1
        """Which one is next."""
        self._is_due = False
        self._began: float | None = None
        """When the step did; None in the first of an epoch."""

    def between_steps(self, step: int, loader: RankLoader | None = None) -> None:
        self._step = step + 1
        if self._is_spoiled:
            self._stop(is_complete=False)
        if self._began is not None:
            self._began = time.perf_counter()  # after what others do here

    def begin_microbatch(self, number: int) -> None:
        if self._probe is not None:
            self._probe.begin_forward()
        else:
            self._begin(number, self._prepared)

    def _begin(self, number: int, trained: Callable[[], Sequence[Trained]]) -> None:
        self._is_due |= is_sampled(number)
        if self._is_due and not is_profiled():
            self._is_due = False
            self._probe = StepProbe(
                trained(), self._device, step=self._step, began=self._began
            )
            self._probe.start()

    def begin_backward(self) -> None:
        if self._probe is not None:
            self._probe.begin_backward()

    def end_backward(self) -> None:
        if self._probe is not None:
            self._probe.end_backward()

    def optimizer_stepped(self) -> None:
        if not self._is_by_hand:
            self._stop(is_complete=True)

    def step_taken(self, step: int) -> None:
        self._step = step + 1
        self._began = time.perf_counter()
        if self._is_by_hand:  # all of its optimizers have stepped since it began
            self._stop(is_complete=True)
        if self._probe is None and not self._prepared() and may_enter_mode():
            self._begin(step + 1, lambda: [Noticed(each) for each in self._noticed()])
            self._is_by_hand = self._probe is not None

    def end_epoch(self) -> None:
        self._began = None

    def end(self, step: int) -> None:
        if self._is_due and self._probe is None:
            self._note(UNMEASURED)

    def close(self) -> None:
        self._stop(is_complete=False)

    def _stop(self, *, is_complete: bool) -> None:
        if self._probe is None:
            return
        measured = self._probe.stop()
        if measured is None:
            self._is_spoiled = True  # more than a step will have passed when it ends
        else:
            is_complete = is_complete and not self._is_spoiled
            self._probe, self._is_by_hand, self._is_spoiled = None, False, False
            if is_complete:
                self.peak_bytes = measured.memory["total_peak"]
                self._report(measured)


class ReplicaObserver(Observer):
    """Compares what ranks hold replicas of, and the samples that they draw."""

    def __init__(
        self,
        optimizers: Sequence[PreparedOptimizer],
        *,
        report: Callable[[Any], None],
        num_backwards: Callable[[], int] | None,
    ) -> None:
        """`num_backwards()` so far, where every DataLoader of the cell is watched."""
        self.watch = ReplicaWatch()
        self._optimizers = optimizers
        self._report = report
        self._num_backwards = num_backwards

    def watching(self) -> contextlib.AbstractContextManager[None]:
        if self._num_backwards is None:
            return contextlib.nullcontext()
        return self.watch.watching_loaders(self._num_backwards)

    def step_taken(self, step: int) -> None:
        if self.watch.is_due(step):
            self._check(step)

    def end(self, step: int) -> None:
        self._check(step)
        self._report(self.watch.notes(step))

    def _check(self, step: int) -> None:
        replicas: dict[str, torch.Tensor] = {}
        for number, each in enumerate(self._optimizers):
            of_which = f" of model {number + 1}" if number else ""
            found = each.prepared.replicas() | each.forward_state.replicas
            for name, tensor in found.items():
                replicas[name + of_which] = tensor
        self.watch.check(step, replicas)


def is_sampled(step: int) -> bool:
    """Whether a run's optimizer step `step`, counted from 1, is measured.

    The first, in which state is made; the third, because DDP rebuilds its buckets in
    the second; then the 10th, 30th, 100th, 300th, ..., so that it costs nothing.
    """
    return str(step).rstrip("0") in ("1", "3")
