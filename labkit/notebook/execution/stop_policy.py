"""Decides when the ranks of a cell are asked to stop, and when they are killed."""

from collections.abc import Collection
from dataclasses import dataclass
from dataclasses import field

from labkit import timeouts

NUM_ASKED = 5
"""A rank that does not even answer, asked so often, is killed: native code there holds
the GIL. The time alone does not count, which passes for a whole machine that sleeps."""
NUM_ASKED_ALONE = 2
"""From then on it gets a signal too: ipyparallel's channels may be stuck."""


@dataclass
class Actions:
    """What to do now, each to these ranks."""

    ask: list[int] = field(default_factory=list)
    """To stop the cell; `StopPolicy.answered` is called with the answer."""
    signal: list[int] = field(default_factory=list)
    """As well, by the system."""
    kill: list[int] = field(default_factory=list)
    report: list[int] = field(default_factory=list)
    """That they still run: once a cell."""


class StopPolicy:
    """Decides how to stop one cell, from what has happened and what time it is.

    It does nothing itself and reads no clock: each `now` is a time of one monotonic
    clock. `interrupt`, `answered` and `done` may be called in any thread.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        """`patience_s` is how long the ranks may take to end by themselves, once the
        user or the time limit wants that."""
        self._patience_s = patience_s
        self.was_interrupted = False
        self.timed_out = False
        self.deadline: float | None = None
        self._interrupted_at: float | None = None
        self._kill_at: float | None = None
        self.start_over()

    def start_over(self) -> None:
        """The cell is run again: a request to end it stays."""
        self.killed: set[int] = set()
        self._is_ending = False
        self._stop_at: float | None = None
        self._next_look = 0.0
        self._is_reported = False
        self._asked_at: dict[int, float] = {}
        """When each rank was last asked to stop."""
        self._num_asked: dict[int, int] = {}
        """How often, since it last answered."""
        self._heard_at: dict[int, float] = {}
        """When a rank that is done with the cell was last heard."""

    # ---- what happened ----

    def fail(self, now: float) -> None:
        """A rank has failed; the others may wait for it."""
        if self._stop_at is None:
            self.stop(now + timeouts.GRACE_S)

    def stop(self, when: float) -> None:
        """Stop the ranks from then on, whatever they do."""
        if self._stop_at is None or when < self._stop_at:
            self._stop_at = self._next_look = when

    def interrupt(self, now: float) -> None:
        """The user wants the cell to stop; the second time, whatever it costs."""
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif self._kill_at is None:
            self._kill_at = max(
                now + timeouts.AGAIN_S, self._interrupted_at + timeouts.SECOND_AFTER_S
            )
        self.was_interrupted = True

    def answered(self, rank: int) -> None:
        """A rank that was asked to stop has said that it heard."""
        self._num_asked.pop(rank, None)

    def done(self, rank: int, now: float) -> None:
        """The rank is done with the cell; its outcome may still be on its way."""
        self._heard_at[rank] = now

    def heard(self, rank: int, when: float) -> None:
        """The rank has sent something."""
        if rank in self._heard_at:
            self._heard_at[rank] = max(when, self._heard_at[rank])

    # ---- what follows ----

    @property
    def is_stopping(self) -> bool:
        """Whether ranks are asked to stop, or will be after the grace."""
        return self._stop_at is not None

    def is_patient(self, now: float) -> bool:
        """Whether the ranks may still end by themselves."""
        return self._is_ending and self._stop_at is not None and now < self._stop_at

    def should_end(self, now: float) -> bool:
        """Whether the user, or the time limit, wants the cell to end."""
        if self.deadline is not None and now > self.deadline:
            self.timed_out = True
        return self.was_interrupted or self.timed_out

    def due(self, running: Collection[int], now: float) -> Actions:
        """What to do now to the ranks that still run the cell."""
        if self.should_end(now) and not self._is_ending:
            self._is_ending = True
            self.stop(now + self._patience_s)
        if self._kill_at is not None:
            self.stop(now)
        if self._stop_at is None or now < self._stop_at:
            return Actions()
        at_rest = self.killed.union(self._heard_at)
        running = [rank for rank in running if rank not in at_rest]
        kill = [rank for rank in running if self._is_past_stopping(rank, now)]
        self.killed.update(kill)
        actions = Actions(kill=kill)
        if not self._is_reported and now - self._stop_at > timeouts.STILL_RUNS_S:
            self._is_reported = True
            actions.report = [rank for rank in running if rank not in kill]
        if now < self._next_look:
            return actions
        self._next_look = now + timeouts.REPEAT_S
        for rank in running:
            num_asked = self._num_asked.get(rank, 0)
            if rank in kill or (num_asked and not self._is_unanswered(rank, now)):
                continue
            self._asked_at[rank] = now
            self._num_asked[rank] = num_asked + 1
            actions.ask.append(rank)
            if num_asked >= NUM_ASKED_ALONE:
                actions.signal.append(rank)
        return actions

    def is_silent(self, rank: int, now: float) -> bool:
        """Whether the rank, done with the cell, will not say any more how it ended."""
        return now - self._heard_at.get(rank, now) > timeouts.OUTCOME_AFTER_S

    def _is_unanswered(self, rank: int, now: float) -> bool:
        return now - self._asked_at[rank] > timeouts.ASK_AGAIN_S

    def _is_past_stopping(self, rank: int, now: float) -> bool:
        """Whether nothing will stop the rank but the end of its process."""
        assert self._stop_at is not None
        num_asked = self._num_asked.get(rank, 0)
        return (
            (num_asked >= NUM_ASKED and self._is_unanswered(rank, now))
            or now - self._stop_at > timeouts.KILL_AFTER_S
            or (self._kill_at is not None and now > self._kill_at)
        )
