"""Records chosen steps of a run with torch.profiler, the same ones on every rank."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile
from torch.profiler import record_function

from labkit.compat.torch import is_profiled
from labkit.rank.data.loader import RankLoader
from labkit.rank.profiling.module_marks import ModuleMarks
from labkit.rank.training.observers import Observer
from labkit.records import DATA_MARK
from labkit.records import STEP_MARK
from labkit.records import TRACE_FILE

TOO_SHORT = (
    "--profile: the run ended after {taken} steps, and step {first} was to be the "
    "first to be recorded; --profile 2-4 chooses earlier ones, from the second on"
)
IN_USE = (
    "--profile: nothing was recorded on rank {rank}, as a profiler of the cell's own "
    "is active, and a process has one at a time; leave out one of the two"
)
NO_FOLDER = "--profile: nothing was recorded, as the run has no folder on disk"
BROKEN_OFF = (
    "--profile: the run ended while steps {first} to {last} were recorded, and nothing "
    "is kept of them"
)
NOT_WRITTEN = "--profile: what rank {rank} has recorded cannot be written: {error}"
SCHEDULED = Path("/proc/thread-self/schedstat")
"""On Linux: the time that the thread has run and has waited to run, in nanoseconds."""


class StepRecorder(Observer):
    """Records `steps` and writes them to a file as they end.

    The profiler starts a step earlier: ranks are not ready at the same time, and the
    first collective has them wait for each other. It is that of the process, and is
    off again however the run ends.
    """

    def __init__(
        self,
        steps: range,
        folder: Path | None,
        *,
        rank: int,
        device: torch.device,
        sees_modules: bool,
        note: Callable[[str], None],
    ) -> None:
        """With `sees_modules` the forward passes of modules are marked: compiled code
        would be compiled again for that."""
        self._steps = steps
        self._folder = folder
        self._rank = rank
        self._device = device
        self._note = note
        self._is_over = folder is None
        self._profiler: profile | None = None
        self._modules = ModuleMarks() if sees_modules else None
        self._marks = contextlib.ExitStack()
        """The ranges that are open: the step's, and in it that of the next batch."""
        self._step_at = -1
        """Steps that were taken when the open range began."""
        self._noted: list[list[int]] = []
        """Each step, when it began by `time.time_ns`, and twice two numbers of
        nanoseconds, at its begin and at its end: see `core_times`."""

    @property
    def left_out(self) -> range:
        """Steps in which the profiler is at work."""
        return range(self._steps[0] - 1, self._steps[-1] + 1)

    # ---- events of the run ----

    def between_steps(self, step: int, loader: RankLoader | None = None) -> None:
        if self._is_over or step + 1 < self.left_out[0]:
            return
        if step >= self._steps[-1]:
            self._finish()
            return
        if self._profiler is None and not self._start():
            return
        if step != self._step_at:  # and no further microbatch
            self._step_at = step
            self._end_step()
            if step + 1 in self._steps:
                times = core_times()
                self._noted.append([step + 1, time.time_ns(), *times, *times])
                self._marks.enter_context(record_function(STEP_MARK.format(step + 1)))
        if loader is not None:
            self._batch = self._marks.enter_context(contextlib.ExitStack())
            self._batch.enter_context(record_function(DATA_MARK))

    def begin_microbatch(self, number: int) -> None:
        if self._profiler is not None:
            self._batch.close()

    def end_epoch(self) -> None:
        if self._profiler is not None:
            self._batch.close()  # there was none

    def end(self, step: int) -> None:
        if self._folder is None:
            self._note(NO_FOLDER)
        elif self._profiler is not None and step >= self._steps[-1]:
            self._finish()
        elif self._profiler is None and not self._is_over:
            self._note(TOO_SHORT.format(taken=step, first=self._steps[0]))

    def close(self) -> None:
        if self._profiler is not None:
            first, last = self._steps[0], self._steps[-1]
            self._note(BROKEN_OFF.format(first=first, last=last))
            self._stop()

    def _end_step(self) -> None:
        self._marks.close()
        if self._noted:
            self._noted[-1][-2:] = core_times()

    # ---- the profiler ----

    def _start(self) -> bool:
        if is_profiled():
            self._is_over = True
            self._note(IN_USE.format(rank=self._rank))
            return False
        self._batch = contextlib.ExitStack()
        # Else it writes lines to stderr; read where a profiler is started first.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities, record_shapes=True, profile_memory=True
        )
        self._profiler = profiler  # before it starts: an interrupt may come
        profiler.start()
        if self._modules is not None:
            self._modules.install()
        return True

    def _stop(self) -> profile:
        assert self._profiler is not None
        profiler, self._profiler, self._is_over = self._profiler, None, True
        if self._modules is not None:
            self._modules.remove()
        self._marks.close()
        profiler.stop()
        return profiler

    def _finish(self) -> None:
        """Write what was recorded, now: the run may yet fail."""
        assert self._folder is not None
        self._end_step()
        assert self._profiler is not None
        facts = {
            "rank": self._rank,
            "device": str(self._device),
            "steps": self._noted,
        }
        self._profiler.add_metadata_json("labkit", json.dumps(facts))
        profiler = self._stop()
        path = self._folder / TRACE_FILE.format(self._rank)
        try:
            with renamed_to(path) as temporary:
                profiler.export_chrome_trace(str(temporary))
        except OSError as error:
            self._note(NOT_WRITTEN.format(rank=self._rank, error=error))


def core_times() -> list[int]:
    """For how long this thread has had a core, and has waited for one while others had
    it, in nanoseconds; 0 for the second where the system does not count it."""
    try:
        waited = int(SCHEDULED.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        waited = 0
    return [time.thread_time_ns(), waited]


@contextlib.contextmanager
def renamed_to(path: Path) -> Iterator[Any]:
    """Where to write a file that is then at `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{os.getpid()}.{path.name.split('.', 1)[1]}.tmp.gz")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
