"""Records chosen steps of a run with torch.profiler, the same ones on every rank."""

import contextlib
from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

from labkit.rank.data.loader import RankLoader
from labkit.rank.profiling.recorder import IN_USE
from labkit.rank.profiling.recorder import Recorder
from labkit.rank.steps.observers import Observer
from labkit.records import DATA_MARK

TOO_SHORT = (
    "the run ended after {taken} steps, and step {first} was to be the "
    "first to be recorded; --profile 2-4 chooses earlier ones, from the second on"
)
PASSED = (
    "nothing was recorded, as the run began after {taken} steps, and step {last} was "
    "to be the last to be recorded; choose later ones, or how many: --profile 3"
)
NO_FOLDER = "nothing was recorded, as the run has no folder on disk"
FEWER = "of {chosen}, {recorded} recorded: {why}"
SEVERAL = (
    "the loop takes several optimizer steps between two batches, and these are "
    "recorded as one, by the number of the first; a longer range has more of them"
)
BEGAN = "the run began after {taken} steps"
BROKEN_OFF = (
    "the run ended while steps {first} to {last} were recorded, and nothing "
    "is kept of them"
)


class StepRecorder(Observer):
    """Records `steps` and writes them to a file as they end.

    The profiler starts a step earlier: ranks are not ready at the same time, and the
    first collective has them wait for each other. It is off again however the run ends.
    """

    def __init__(
        self,
        steps: range,
        recorder: Recorder,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        """Where the run `has_failed()`, its error says why it has ended early."""
        self._has_failed = has_failed
        self._steps = steps
        self._recorded: list[int] = []
        self._recorder = recorder
        recorder.chosen = range(steps[0] - 1, steps[-1] + 1)
        self._note = recorder.note
        self._is_over = recorder.folder is None
        self._batch = contextlib.ExitStack()
        """The range in which the loop waits for a batch, while it does."""
        self._began_after: int | None = None
        """Steps that were taken when the loop first came between two."""
        self._step_at = -1
        """Steps that were taken when the open range began."""
        self._has_batch = False
        """Whether the loop has had a batch in it, and has not taken its step."""
        self._is_between_passes = False

    @property
    def _is_recording(self) -> bool:
        return not self._is_over and self._step_at >= 0

    def between_steps(self, step: int, loader: RankLoader | None = None) -> None:
        if self._began_after is None:
            self._began_after = step
        if self._is_over or step + 1 < self._recorder.chosen[0]:
            return
        if step >= self._steps[-1]:
            self._end(step)
            return
        if not self._is_recording and not self._recorder.start():
            self._is_over = True
            self._note(IN_USE.format(rank=self._recorder.rank))
            return
        if step != self._step_at or self._is_between_passes:  # no further microbatch
            self._step_at = step
            self._has_batch = self._is_between_passes = False
            self._recorder.end_step()
            if step + 1 in self._steps:
                self._recorder.begin_step(step + 1)
                self._recorded.append(step + 1)
        if loader is not None:
            marks = self._recorder.marks
            self._batch = marks.enter_context(contextlib.ExitStack())
            self._batch.enter_context(record_function(DATA_MARK))

    def begin_microbatch(self, number: int) -> None:
        self._batch.close()
        self._has_batch = True

    def step_taken(self, step: int) -> None:
        self._has_batch = False

    def end_epoch(self) -> None:
        self._batch.close()  # there was none
        if self._is_recording and not self._has_batch:
            # What lies between passes, as a validation, is of no step: the next one
            # begins when the next pass asks for its first batch.
            self._recorder.end_step()
            self._is_between_passes = True

    def end(self, step: int) -> None:
        if self._recorder.folder is None:
            self._note(NO_FOLDER)
        elif self._is_over:
            return
        elif step >= self._steps[-1]:
            self._end(step)
        elif not (
            self._is_recording or self._recorder.has_written or self._has_failed()
        ):
            self._note(TOO_SHORT.format(taken=step, first=self._steps[0]))

    def close(self) -> None:
        if self._recorder.is_recording:
            first, last = self._steps[0], self._steps[-1]
            self._note(BROKEN_OFF.format(first=first, last=last))
            self._recorder.stop()

    def _end(self, step: int) -> None:
        if self._is_recording:
            if self._recorded:
                self._recorder.finish()
            else:
                self._recorder.stop()
            self._note_left_out()
        elif not self._recorder.has_written:
            self._note(PASSED.format(taken=step, last=self._steps[-1]))
        self._is_over = True

    def _note_left_out(self) -> None:
        """Of the chosen steps, those that are none of their own in the profile."""
        # A step that was cut off by the end of a pass is there twice.
        numbers: list[Any] = sorted(set(self._recorded))
        if len(numbers) == len(self._steps):
            return
        first, last = self._steps[0], self._steps[-1]
        chosen = f"steps {first}-{last}" if last > first else f"step {first}"
        if len(numbers) > 3:
            numbers[2:-1] = ["..."]
        found = ", ".join(map(str, numbers)) or "nothing"
        found += " were" if len(numbers) > 1 else " was"
        why = SEVERAL
        if self._began_after is not None and self._began_after >= first:
            why = BEGAN.format(taken=self._began_after)
        self._note(FEWER.format(chosen=chosen, recorded=found, why=why))
