"""Where a run can be stopped on all ranks alike: between two optimizer steps."""

import threading

from labkit import timeouts
from labkit.rank.data.loader import RankLoader
from labkit.rank.steps.observers import Observer


class Stopped(KeyboardInterrupt):
    """Raised in a cell to stop it. The notebook says where it was: a traceback
    from here would only take time."""

    def _render_traceback_(self) -> list[str]:
        return []


class StoppedAtStep(Stopped):
    """Raised between the same two optimizer steps on every rank."""


class StopPoint(Observer):
    """Stops a run after the same step on every rank, wherever each is when it is asked.

    First all ranks are asked to `hold`: each says how many steps it has taken, and
    takes one more at most. The step that they `stop_after` is then ahead of all.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._is_holding = False
        self._stop_after: int | None = None
        self._answered = threading.Condition()

    @property
    def num_steps(self) -> int:
        """Taken so far."""
        return self._num_steps

    def between_steps(self, step: int, loader: RankLoader | None = None) -> None:
        """Raise StoppedAtStep if `step` steps are enough."""
        # In this order: `hold` writes and reads them in the other.
        self._num_steps = step
        if not self._is_holding:
            return
        with self._answered:
            self._answered.wait_for(
                lambda: self._stop_after is not None, timeouts.HOLD_S
            )
            if self._stop_after is None:
                self._is_holding = False  # the notebook no longer answers
            elif step >= self._stop_after:
                raise StoppedAtStep

    def hold(self) -> int:
        """Wait at the next boundary; the steps taken so far. From another thread."""
        self._is_holding = True
        return self._num_steps

    def stop_after(self, num_steps: int) -> None:
        """Continue until `num_steps` are taken, and stop there. From another thread."""
        with self._answered:
            self._stop_after = num_steps
            self._answered.notify_all()
