"""Records with torch.profiler what a rank does, and writes it to the run's folder."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile
from torch.profiler import record_function

from labkit.checks import UserError
from labkit.compat.c10d import flight_records
from labkit.compat.c10d import names_of_groups
from labkit.compat.c10d import ranks_of
from labkit.compat.torch import is_profiled
from labkit.compat.torch import refusing_profilers
from labkit.rank.profiling.module_marks import ModuleMarks
from labkit.records import STEP_MARK
from labkit.records import TRACE_FILE

NOT_WRITTEN = "what rank {rank} has recorded cannot be written: {error}"
IN_USE = (
    "nothing was recorded on rank {rank}, as a profiler of the cell's own "
    "is active, and a process has one at a time; leave out one of the two"
)
SECOND = (
    "this profiler cannot start: --profile or profile() records on rank {rank}, and a "
    "process has one profiler at a time; leave out one of the two"
)
SCHEDULED = Path("/proc/thread-self/schedstat")
"""On Linux: the time that the thread has run and has waited to run, in nanoseconds."""


def quiet_profilers() -> None:
    """Have profilers, the cell's own too, write no lines of theirs to stderr: read
    where a process starts its first one."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class Recorder(Container[int]):
    """The profiler of a rank, which is that of its process: one at a time. It contains
    the steps in which it is at work."""

    def __init__(
        self,
        folder: Path | None,
        *,
        rank: int,
        device: torch.device,
        sees_modules: bool,
        note: Callable[[str], None],
    ) -> None:
        """With `sees_modules` the forward passes of modules are marked: compiled code
        would be compiled again for that."""
        self.rank = rank
        self.folder = folder
        self._device = device
        self.note = note
        self._profiler: profile | None = None
        self._modules = ModuleMarks() if sees_modules else None
        self._refusing = contextlib.ExitStack()
        """Other profilers, while this one is at work."""
        self.marks = contextlib.ExitStack()
        """The ranges that are open: the step's, and what is in it."""
        self._is_in_step = False
        self.chosen = range(0)
        """Steps to be recorded, and the one before them."""
        self.num_written = 0
        """Recordings in this run, of which the folder has the last."""
        self._began_ns = 0
        self._noted: list[list[int]] = []
        """Each step, when it began by `time.time_ns`, and twice two numbers of
        nanoseconds, at its begin and at its end: see `core_times`."""

    def __contains__(self, step: object) -> bool:
        return step in self.chosen or self.is_recording

    @property
    def has_written(self) -> bool:
        """In this run, maybe before it was restarted."""
        return self.folder is not None and self._path.exists()

    @property
    def _path(self) -> Path:
        assert self.folder is not None
        return self.folder / TRACE_FILE.format(self.rank)

    @property
    def is_recording(self) -> bool:
        return self._profiler is not None

    def start(self) -> bool:
        """Begin to record; False where the process has a profiler already."""
        if is_profiled():
            return False
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities, record_shapes=True, profile_memory=True
        )
        self._noted = []
        self._began_ns = time.time_ns()
        self._profiler = profiler  # before it starts: an interrupt may come
        profiler.start()
        self._refusing.enter_context(
            refusing_profilers(lambda: UserError(SECOND.format(rank=self.rank)))
        )
        if self._modules is not None:
            self._modules.install()
        return True

    def begin_step(self, number: int) -> None:
        times = core_times()
        self._is_in_step = True
        self._noted.append([number, time.time_ns(), *times, *times])
        self.marks.enter_context(record_function(STEP_MARK.format(number)))

    def end_step(self) -> None:
        self.marks.close()
        if self._is_in_step:
            self._is_in_step = False
            self._noted[-1][-2:] = core_times()

    def stop(self) -> profile | None:
        """Record no longer; nothing is written. None where the cell has ended the
        process's profiler: there is nothing to stop or to write then."""
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        self._refusing.close()
        if self._modules is not None:
            self._modules.remove()
        self.marks.close()
        if not is_profiled():
            self.note(IN_USE.format(rank=self.rank))
            return None
        profiler.stop()
        return profiler

    def finish(self) -> None:
        """End the step and write what was recorded, now: the run may yet fail."""
        assert self._profiler is not None
        self.end_step()
        facts = {
            "rank": self.rank,
            "device": str(self._device),
            "steps": self._noted,
            "calls": calls_of_groups(self._began_ns),
        }
        if is_profiled():
            self._profiler.add_metadata_json("labkit", json.dumps(facts))
        profiler = self.stop()
        if profiler is None:
            return
        try:
            with renamed_to(self._path) as temporary:
                profiler.export_chrome_trace(str(temporary))
            self.num_written += 1
        except OSError as error:
            self.note(NOT_WRITTEN.format(rank=self.rank, error=error))


def core_times() -> list[int]:
    """For how long this thread has had a core, and has waited for one while others had
    it, in nanoseconds; 0 for the second where the system does not count it."""
    try:
        waited = int(SCHEDULED.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        waited = 0
    return [time.thread_time_ns(), waited]


def calls_of_groups(since_ns: int) -> list[tuple[str, int, list[int]]]:
    """The collectives since then, each with when it was called and its group's ranks,
    which gloo's ranges in a trace do not say: the newest that torch has kept."""
    ranks = {name: ranks_of(group) for group, name in names_of_groups().items()}
    return [
        (entry["profiling_name"], entry["time_created_ns"], ranks[name])
        for record in flight_records(True, False)
        for entry in json.loads(record).get("entries", [])
        if (name := entry["process_group"][0]) in ranks
        and entry["time_created_ns"] >= since_ns
    ]


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
