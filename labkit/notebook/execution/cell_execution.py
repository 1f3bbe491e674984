"""Sends a cell to ranks and waits until it has ended on every one of them."""

import contextlib
import dataclasses
import queue
import signal
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future
from typing import Any

from labkit.checks import UserError
from labkit.notebook.cluster.engines import Cluster
from labkit.notebook.cluster.engines import RankDiedError
from labkit.notebook.diagnostics.hang_detector import HangWatch
from labkit.notebook.kernel.output import OutputMerger
from labkit.notebook.kernel.output import late_output
from labkit.records import Batch
from labkit.records import CellSpec
from labkit.records import Outcome

GRACE_S = 0.2
"""How long the others may go on after the first failure; a rank that failed at the
same line needs no interrupt, and the group then stays as it is."""

REPEAT_S = 0.5
KILL_AFTER_S = 30.0
"""A rank that goes on for so long after an interrupt is ended."""
ASK_AGAIN_S = 2.0
NUM_ASKED = 5
"""And so is one that does not even answer, asked so often: native code there holds the
GIL. What counts is not the time alone, which passes for a whole machine that sleeps."""
NUM_ASKED_ALONE = 2
"""From then on it gets a signal too: ipyparallel's channels may be stuck."""
SECOND_AFTER_S = 2.5
AGAIN_S = 0.5
"""A second interrupt ends what runs `AGAIN_S` later, and not before `SECOND_AFTER_S`
from the first one: a key may be pressed twice, and a rank about to end by itself."""

ANSWER_S = 5.0
OUTCOME_AFTER_S = 10.0
"""How long the word on how a cell ended may take, after the rank is done with it."""

_TICK_S = 0.05


class Dispatch:
    """One cell on its way through the ranks; `wait` sees it to its end."""

    def __init__(
        self,
        cluster: Cluster,
        code: str,
        spec: CellSpec,
        ranks: Sequence[int],
        *,
        on_batch: Callable[[int, Batch], None] = lambda rank, batch: None,
        on_report: Callable[[int, Any], None] = lambda rank, report: None,
        on_tick: Callable[[], None] = lambda: None,
        before_output: Callable[[], None] = lambda: None,
        may_clear: bool = True,
        hang_after_s: float = 0.0,
    ) -> None:
        self.outcomes: list[Outcome] = []
        """In the order in which the ranks failed or ended."""
        self.was_interrupted = False
        self.timed_out = False
        self.is_stopping = False
        """Whether the ranks were asked to stop at the same step: no failure."""
        self.problem: Exception | None = None
        """What failed in this process meanwhile; the ranks were stopped for it."""
        self._cluster = cluster
        self._on_batch = on_batch
        self._on_report = on_report
        self._on_tick = on_tick
        self._pending = set(ranks)
        self._order: list[int] = []
        self._tracebacks: dict[int, list[str]] = {}
        self._before_output = before_output
        self._may_clear = may_clear
        self._ranks = ranks
        self._output = self._merger()
        self._events: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._stop_since: float | None = None
        self._next_interrupt = 0.0
        self._interrupted_at: float | None = None
        self._kill_at: float | None = None
        self._asked_at: dict[int, float] = {}
        """When each rank was last asked to stop."""
        self._num_asked: dict[int, int] = {}
        """How often, since it last answered."""
        self._killed: set[int] = set()
        self._heard_at: dict[int, float] = {}
        """When a rank that is done with the cell was last heard, by rank."""
        self._watch = HangWatch(
            cluster,
            after_s=hang_after_s,
            in_cell=spec.execution_count,
            before_output=before_output,
        )
        self._code = code
        self._spec = dataclasses.asdict(spec)
        self._deadline: float | None = None

    @property
    def is_to_end(self) -> bool:
        """Whether somebody wants it to."""
        self._look_at_the_clock()
        return (
            self.was_interrupted
            or self.timed_out
            or self.is_stopping
            or self.problem is not None
        )

    def begin_anew(self, spec: CellSpec) -> None:
        """Make ready to run the cell once more, when it has ended on every rank.

        Whoever wants it to end still does, and the time that is left is less.
        """
        self.outcomes = []
        self._pending = set(self._ranks)
        self._tracebacks = {}
        self._output = self._merger()
        self._events = queue.SimpleQueue()  # what comes late is for the old one
        self._order = []
        self._stop_since = None
        self._asked_at, self._num_asked, self._heard_at = {}, {}, {}
        self._killed = set()
        self._spec = dataclasses.asdict(spec)

    def _merger(self) -> OutputMerger:
        return OutputMerger(
            self._ranks,
            self._before_output,
            pids=self._cluster.pids,
            may_clear=self._may_clear,
        )

    def _look_at_the_clock(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.timed_out = True

    def _send(self, rank: int) -> None:
        if not self._cluster.is_alive(rank):
            return  # `wait` finds that out
        events = self._events

        def post(kind: str, content: Any) -> None:
            events.put((rank, kind, content))

        with contextlib.suppress(RankDiedError):  # a moment ago
            future = self._cluster.execute(rank, self._code, self._spec, post)
            future.add_done_callback(lambda done: post("reply", done.result()))

    def wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Run to the end on every rank; how it ended there, in order of rank.

        An interrupt of this process stops the ranks, and so does the first failure
        of one of them, and `timeout_s`. A rank that does not stop is ended; its
        outcome is "restarted", which is left to the caller. Raises RankDiedError where
        no rank can be reached any more.
        """
        lost = ""
        if timeout_s is not None and self._deadline is None:
            self._deadline = time.monotonic() + timeout_s
        with self.noting_interrupts():
            for rank in self._ranks:
                self._send(rank)
            while self._pending:
                try:
                    self._take_events()
                    self._output.write_ready()
                    self._on_tick()
                except Exception as error:  # not before the ranks have stopped
                    self.problem = self.problem or error
                    self._stop_ranks_from(time.monotonic())
                self._look_at_the_clock()
                if self.was_interrupted or self.timed_out:
                    self._stop_ranks_from(time.monotonic())
                if self._stop_since is None:
                    self._watch.tick(self._pending)
                self._interrupt_where_due()
                if lost := self._cluster.lost():
                    for rank in self._pending:
                        self._cluster.kill(rank)  # nobody could stop it later
                for rank in list(self._pending):
                    if not self._cluster.is_alive(rank):
                        self._end(rank, self._died(rank))
                    elif self._is_silent(rank):
                        self._end(rank, says_nothing(rank))
            if self.problem is None:
                self._output.finish()
        self._cluster.on_late_output = late_output()
        if lost:
            raise RankDiedError(lost)
        return sorted(self.outcomes, key=lambda outcome: outcome.rank)

    def stop_at_a_step(self) -> None:
        """Stop every rank after the same optimizer step; from any thread.

        See `labkit.rank.training.stop_point`. RuntimeError where a rank does not
        answer.
        """
        self.is_stopping = True
        ranks = list(self._pending)
        if not ranks:
            return  # dead ones are being brought back: it ends where that does
        replies = [self._cluster.ask(rank, "hold") for rank in ranks]
        try:
            steps = [reply.result(timeout=ANSWER_S) for reply in replies]
        except (TimeoutError, CancelledError) as error:
            raise UserError("a rank does not say at which step it is") from error
        for rank in ranks:
            self._cluster.ask(rank, "stop_after", num_steps=max(steps) + 1)

    def interrupt(self) -> None:
        """Stop every rank; the second time end those that do not. From any thread."""
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif self._kill_at is None:
            first = self._interrupted_at
            self._kill_at = max(now + AGAIN_S, first + SECOND_AFTER_S)
        self.was_interrupted = True

    @contextlib.contextmanager
    def noting_interrupts(self) -> Iterator[None]:
        """Note a SIGINT, where Python would raise KeyboardInterrupt at any line.

        The ranks are to end first, and nothing here is to be left half done.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: Any) -> None:
            self.interrupt()

        previous = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _take_events(self) -> None:
        """Handle what has come; wait for the first event, but not long."""
        timeout = _TICK_S
        while self._pending:
            try:
                rank, kind, content = self._events.get(timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.0
            if rank in self._heard_at:
                self._heard_at[rank] = time.monotonic()
            if self._stop_since is None:
                self._watch.saw_life()
            if kind == "batch":
                self._on_batch(rank, content)
            elif kind == "report":
                self._on_report(rank, content)
            elif kind == "error":
                self._tracebacks[rank] = content.get("traceback", [])
            elif kind == "failing":
                self._order.append(rank)
                self._free_others(content)
            elif kind == "outcome":
                self._end(rank, content)
            elif kind == "reply":
                self._take_reply(rank, content)
            else:
                self._output.add_message(rank, kind, content)

    def _end(self, rank: int, outcome: Outcome) -> None:
        if rank not in self._pending:
            return
        self._pending.discard(rank)
        traceback = self._tracebacks.get(rank, [])
        if rank not in self._order:
            self._order.append(rank)
        self.outcomes.append(dataclasses.replace(outcome, traceback=traceback))
        self.outcomes.sort(key=lambda each: self._order.index(each.rank))
        self._free_others(outcome.status)

    def _free_others(self, status: str) -> None:
        """Stop the ranks that may wait for one that has ended with `status`."""
        if status == "interrupted" and self.is_stopping:
            return  # the others are on their way to the same step
        if status != "ok" and self._stop_since is None:
            self._stop_ranks_from(time.monotonic() + GRACE_S)

    def _take_reply(self, rank: int, reply: Any) -> None:
        if self._cluster.was_dropped(reply):
            self._send(rank)
        else:  # the outcome, which travels on another channel, has come or will
            self._heard_at[rank] = time.monotonic()

    def _is_silent(self, rank: int) -> bool:
        now = time.monotonic()
        return now - self._heard_at.get(rank, now) > OUTCOME_AFTER_S

    def _died(self, rank: int) -> Outcome:
        if rank in self._killed:
            return Outcome(
                rank=rank,
                status="restarted",
                evalue="did not stop and was restarted: its variables are gone",
                group_in_place=False,
            )
        death = self._cluster.death(rank)
        where = ""
        if death.line is not None:
            lines = self._code.splitlines()[death.line - 1 :]
            where = f"line {death.line}: {lines[0].strip()}" if lines else ""
        return Outcome(
            rank=rank,
            status="died",
            ename="the process died",
            evalue=f"{death}; %dist_restart brings it back",
            where=where,
            group_in_place=False,
        )

    def _stop_ranks_from(self, when: float) -> None:
        if self._stop_since is None or when < self._stop_since:
            self._stop_since = when
            self._next_interrupt = when

    def _interrupt_where_due(self) -> None:
        now = time.monotonic()
        if self._stop_since is None or now < self._stop_since:
            return
        for rank in self._pending:
            if rank not in self._killed and self._is_past_stopping(rank, now):
                self._killed.add(rank)
                self._cluster.kill(rank)
        if now < self._next_interrupt:
            return
        self._next_interrupt = now + REPEAT_S
        for rank in self._pending:
            num_asked = self._num_asked.get(rank, 0)
            if num_asked == 0 or now - self._asked_at[rank] > ASK_AGAIN_S:
                self._ask_to_stop(rank, now)
                if num_asked >= NUM_ASKED_ALONE:
                    self._cluster.signal(rank)

    def _ask_to_stop(self, rank: int, now: float) -> None:
        self._asked_at[rank] = now
        self._num_asked[rank] = self._num_asked.get(rank, 0) + 1

        def hear(answer: "Future[Any]") -> None:
            self._num_asked.pop(rank, None)

        answer = self._cluster.interrupt(rank, release_after_s=GRACE_S)
        answer.add_done_callback(hear)

    def _is_past_stopping(self, rank: int, now: float) -> bool:
        """Whether nothing will stop the rank but the end of its process."""
        assert self._stop_since is not None
        is_silent = (
            self._num_asked.get(rank, 0) >= NUM_ASKED
            and now - self._asked_at[rank] > ASK_AGAIN_S
        )
        return (
            is_silent
            or now - self._stop_since > KILL_AFTER_S
            or (self._kill_at is not None and now > self._kill_at)
        )


def says_nothing(rank: int) -> Outcome:
    """How a cell ended on a rank that never said so: it lost what labkit put there."""
    return Outcome(
        rank=rank,
        status="error",
        ename="the rank does not say how the cell ended",
        evalue="something in it has disabled labkit's hooks; "
        "%dist_restart --all restarts every rank",
        group_in_place=False,
    )
