"""Runs the trials of a study on several groups of ranks at once."""

import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from labkit import timeouts
from labkit.checks import UserError
from labkit.notebook.execution.options import RunOptions
from labkit.notebook.kernel import interrupts
from labkit.notebook.kernel.output import say
from labkit.notebook.runs.run import Run
from labkit.notebook.trials.watch import TrialWatch
from labkit.notebook.trials.work import Work

Train = Callable[[str, Work, RunOptions, TrialWatch], Run]
"""Runs work under a strategy to its end."""


@dataclass(frozen=True)
class Place:
    """Ranks in one process group, on which trials run one after the other."""

    ranks: str
    """As "ranks 2-3"."""
    train: Train
    bring_back: Callable[[], Any]
    """Restarts those that are dead."""


@dataclass(frozen=True)
class StudyRanks:
    """What a study may do with the ranks of a lab."""

    world_size: int
    device: str
    divided: Callable[[int], AbstractContextManager[Sequence[Place]]]
    """Into places of so many ranks: one where these are all."""
    estimate: Callable[..., Any]
    """That of the lab."""


class PlaceLostError(UserError):
    """The ranks of a place cannot be brought back."""


class Running:
    """The trials that run now, which the end of the study ends as well."""

    def __init__(self) -> None:
        self.is_ending = False
        """Whether no other is to begin."""
        self._watches: list[TrialWatch] = []

    @contextlib.contextmanager
    def noting(self, watch: TrialWatch) -> Iterator[None]:
        """The trial of `watch` runs."""
        self._watches.append(watch)
        try:
            if self.is_ending:  # since a moment ago
                watch.interrupt()
            yield
        finally:
            self._watches.remove(watch)

    @property
    def have_steps(self) -> bool:
        """Whether any of them has taken one."""
        runs = [watch.run for watch in list(self._watches)]
        return any(run is not None and run.num_steps for run in runs)

    def end(self) -> None:
        """Interrupt all; from any thread, a second time to kill what does not stop."""
        self.is_ending = True
        for watch in list(self._watches):
            watch.interrupt()


def run_at_once(
    places: Sequence[Place],
    work: Callable[[Place], None],
    running: Running,
    tick: Callable[[], None],
) -> None:
    """Call `work` for every place, each in a thread; `tick` is called meanwhile.

    A place that is lost is left out: the others go on. Any other exception ends all,
    and so does an interrupt: it is raised when all have ended.
    """
    errors: list[BaseException] = []
    lost: list[PlaceLostError] = []

    def run(place: Place) -> None:
        interrupts.end_thread_when(lambda: running.is_ending)
        try:
            work(place)
        except PlaceLostError as error:
            lost.append(error)
            if len(lost) < len(places):
                say(f"{place.ranks} are left out of the rest of the study: {error}")
        except BaseException as error:
            errors.append(error)
            if not running.is_ending:  # a second time would kill
                running.end()

    with _ending_at_an_interrupt(running):
        # Each has a context of its own: what it prints belongs to this cell.
        contexts = [contextvars.copy_context() for _ in places]
        threads = [
            threading.Thread(
                target=context.run,
                args=(run, place),
                name=f"labkit {place.ranks}",
                daemon=True,
            )
            for context, place in zip(contexts, places, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(timeouts.POLL_S)
                try:
                    tick()
                except Exception as error:  # raised when the trials have ended
                    if not running.is_ending:
                        errors.append(error)
                        running.end()
    # What went wrong comes before the interrupts that it led to.
    errors.sort(key=lambda error: isinstance(error, KeyboardInterrupt))
    if not errors and len(lost) == len(places):
        errors = [*lost]
    if errors:
        raise errors[0]
    if running.is_ending:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _ending_at_an_interrupt(running: Running) -> Iterator[None]:
    """End what runs at a SIGINT, where Python would raise KeyboardInterrupt here and
    leave the threads alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda signum, frame: running.end())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
