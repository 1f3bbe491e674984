"""Sends a cell to ranks and waits until it has ended on every one of them."""

import contextlib
import dataclasses
import itertools
import queue
import signal
import threading
import time
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future
from typing import Any

from labkit import timeouts
from labkit.checks import UserError
from labkit.notebook.cluster.reach import Engines
from labkit.notebook.cluster.reach import RankDiedError
from labkit.notebook.diagnostics.hang_detector import HangDetector
from labkit.notebook.execution.stop_policy import StopPolicy
from labkit.notebook.kernel.keyboard import Keyboard
from labkit.notebook.kernel.keyboard import can_type
from labkit.notebook.kernel.output import OutputMerger
from labkit.notebook.kernel.output import late_output
from labkit.notebook.kernel.output import say
from labkit.rank_spec import format_ranks
from labkit.records import FUNCTION_NAME
from labkit.records import Batch
from labkit.records import CellSpec
from labkit.records import Outcome


class CellListener:
    """What takes a cell's records, and shows them while it runs; this one does not."""

    label = ""
    """What tells the cell's output from that of another at the same time."""
    may_clear = True
    """Whether the cell may clear what is shown under it."""

    def take_batch(self, rank: int, batch: Batch) -> None:
        """A rank has sent records."""

    def take_report(self, rank: int, report: Any) -> None:
        """A rank has measured a step, or says something of the loop."""

    def tick(self) -> None:
        """Called at every turn of the wait, with messages or without."""

    def before_output(self) -> None:
        """Something is about to be printed."""

    def before_question(self) -> None:
        """The user is about to be asked something, and nothing is shown meanwhile."""


class Tally:
    """How a cell has ended on each rank."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.running = set(ranks)
        self.outcomes: list[Outcome] = []
        """In the order in which the ranks failed or ended."""
        self._order: list[int] = []
        self._tracebacks: dict[int, list[str]] = {}

    def add_traceback(self, rank: int, lines: list[str]) -> None:
        """Take the traceback of the outcome that will come."""
        self._tracebacks[rank] = lines

    def fail(self, rank: int) -> None:
        """The rank has failed; its outcome will come."""
        self._order.append(rank)

    def end(self, rank: int, outcome: Outcome) -> bool:
        """The cell has ended on the rank; whether that is new."""
        if rank not in self.running:
            return False
        self.running.discard(rank)
        if rank not in self._order:
            self._order.append(rank)
        traceback = self._tracebacks.get(rank, [])
        self.outcomes.append(dataclasses.replace(outcome, traceback=traceback))
        self.outcomes.sort(key=lambda each: self._order.index(each.rank))
        return True


_NUMBERS = itertools.count(1)


class CellExecution:
    """One cell on its way through the ranks; `wait` runs it to its end."""

    def __init__(
        self,
        cluster: Engines,
        code: str,
        spec: CellSpec,
        ranks: Sequence[int],
        *,
        listener: CellListener | None = None,
        hang_after_s: float = 0.0,
        other_codes: Mapping[int, str] | None = None,
    ) -> None:
        """`other_codes` are those of ranks that run something in the cell's place."""
        is_run = spec.strategy is not None
        self.stop_policy = StopPolicy(timeouts.ALIKE_S if is_run else 0.0)
        self.is_stopping = False
        """Whether the ranks were asked to stop at the same step: no failure."""
        self.had_sigint = False
        """Whether the user was it that interrupted: labkit itself may do so, too."""
        self.problem: Exception | None = None
        """What failed in this process meanwhile; the ranks were stopped for it."""
        self._cluster = cluster
        self._code = code
        self._other_codes = other_codes or {}
        self._ranks = ranks
        self._listener = listener or CellListener()
        self._watch = HangDetector(
            cluster,
            ranks=ranks,
            after_s=hang_after_s,
            in_cell=spec.execution_count,
            before_output=self._listener.before_output,
            label=self._listener.label,
        )
        self.start_over(spec)

    @property
    def was_interrupted(self) -> bool:
        return self.stop_policy.was_interrupted

    @property
    def timed_out(self) -> bool:
        return self.stop_policy.timed_out

    @property
    def should_end(self) -> bool:
        """Whether the user, the time limit or a fault asks it to end."""
        is_over = self.stop_policy.should_end(time.monotonic())
        return is_over or self.is_stopping or self.problem is not None

    def start_over(self, spec: CellSpec) -> None:
        """Reset, to run the cell again after it has ended on every rank.

        A request to end stays, and the time limit keeps counting.
        """
        self._number = next(_NUMBERS)
        self._spec = dataclasses.asdict(dataclasses.replace(spec, number=self._number))
        self._tally = Tally(self._ranks)
        self.outcomes = self._tally.outcomes
        """In the order in which the ranks failed or ended."""
        self._output = OutputMerger(
            self._ranks,
            self._listener.before_output,
            pids=self._cluster.pids,
            may_clear=self._listener.may_clear,
            label=self._listener.label,
        )
        # Another queue: what comes late is of the cell before. No SimpleQueue: before
        # Python 3.13 its `get` waits for ever if a signal's handler takes longer than
        # what is left of the timeout.
        self._events: queue.Queue[tuple[int, str, Any]] = queue.Queue()
        self._keyboard = Keyboard(self._ranks, self._answer)
        self._held: list[Future[Any]] | None = None
        """The steps that the ranks say they have taken, while they are to end alike."""
        self.stop_policy.start_over()

    def wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Run to the end on every rank; how it ended there, in order of rank.

        An interrupt of this process stops the ranks, and so does the first failure
        of one of them, and `timeout_s`. A rank that does not stop is killed; its
        outcome is "restarted", which is left to the caller. Raises RankDiedError where
        no rank can be reached any more.
        """
        lost, next_look = "", 0.0
        policy, running = self.stop_policy, self._tally.running
        if timeout_s is not None and policy.deadline is None:
            policy.deadline = time.monotonic() + timeout_s
        with self.noting_interrupts():
            self._spec["can_type"] = can_type()
            for rank in self._ranks:
                self._send(rank)
            while running:
                try:
                    self._take_events()
                    self._output.write_ready()
                    if not policy.is_stopping:
                        self._let_ask(running)
                    self._listener.tick()
                    if not policy.is_stopping:
                        self._watch.tick(running)
                except Exception as error:  # not before the ranks have stopped
                    self.problem = self.problem or error
                    policy.stop(time.monotonic())
                if (now := time.monotonic()) >= next_look:  # of every rank, in turn
                    next_look = now + timeouts.POLL_S
                    self._stop_where_due(now)
                    lost = self._end_the_dead(now)
            if self.problem is None:
                self._output.finish()
        for each in self.outcomes:  # no later kernel is to say it again
            if each.status != "ok" or self._spec["strategy"] is not None:
                self._cluster.ask(each.rank, "received", number=self._number)
        self._cluster.show_late_output(late_output())
        if lost:
            raise RankDiedError(lost)
        return sorted(self.outcomes, key=lambda outcome: outcome.rank)

    def stop_at_a_step(self) -> None:
        """Stop every rank after the same optimizer step; from any thread.

        See `labkit.rank.steps.stop_point`. RuntimeError where a rank does not
        answer.
        """
        self.is_stopping = True
        ranks = list(self._tally.running)
        if not ranks:
            return  # dead ranks are restarting: the run ends after that
        replies = [self._cluster.ask(rank, "hold") for rank in ranks]
        try:
            steps = [reply.result(timeout=timeouts.ANSWER_S) for reply in replies]
        except (TimeoutError, CancelledError) as error:
            raise UserError("a rank did not report its step") from error
        for rank in ranks:
            self._cluster.ask(rank, "stop_after", num_steps=max(steps) + 1)

    def interrupt(self) -> None:
        """Stop every rank; the second time kill those that do not. From any thread."""
        self.stop_policy.interrupt(time.monotonic())

    @contextlib.contextmanager
    def noting_interrupts(self) -> Iterator[None]:
        """Note a SIGINT, where Python would raise KeyboardInterrupt at any line.

        The ranks end first, and nothing here is left half done.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: Any) -> None:
            self.had_sigint = True
            self.interrupt()

        previous = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    # ---- to the ranks ----

    def _send(self, rank: int) -> None:
        if not self._cluster.is_alive(rank):
            return  # `wait` finds that out
        events = self._events

        def post(kind: str, content: Any) -> None:
            events.put((rank, kind, content))

        def hear(done: "Future[Any]") -> None:
            reply = done.result()
            if events is self._events and not self._cluster.was_aborted(reply):
                # Before what it has printed is shown: the rank need not be stopped.
                self.stop_policy.done(rank, time.monotonic())
            post("reply", reply)

        with contextlib.suppress(RankDiedError):  # a moment ago
            code = self._other_codes.get(rank, self._code)
            future = self._cluster.execute(rank, code, self._spec, post)
            future.add_done_callback(hear)

    def _stop_where_due(self, now: float) -> None:
        # What a rank is not asked it is not killed for: its host may be found lost.
        reached = [r for r in self._tally.running if not self._cluster.is_cut_off(r)]
        actions = self.stop_policy.due(reached, now)
        if self.stop_policy.is_patient(now):
            self._end_alike(now)
        for rank in actions.ask:
            self._ask_to_stop(rank)
        for rank in actions.signal:
            self._cluster.signal(rank)
        for rank in actions.kill:
            self._cluster.kill(rank)
        if actions.report:
            self._listener.before_output()
            again = self.was_interrupted
            text = still_runs(actions.report, was_interrupted=again)
            say(self._listener.label + text)

    def _end_alike(self, now: float) -> None:
        """Have the ranks end after the same optimizer step, as `stop_at_a_step` does,
        without waiting for their answers; or have them interrupted at once, where one
        has ended or none takes steps."""
        running = self._tally.running
        if self._held is None:
            self._held = [self._cluster.ask(rank, "hold") for rank in running]
        elif self._held and all(answer.done() for answer in self._held):
            answers, self._held = self._held, []
            came = [each for each in answers if not each.cancelled()]
            steps = [each.result() for each in came if each.exception() is None]
            if len(running) < len(self._ranks) or not any(steps):
                self.stop_policy.stop(now)
                return
            for rank in running:
                self._cluster.ask(rank, "stop_after", num_steps=max(steps) + 1)

    def _answer(self, rank: int, number: int, line: str) -> None:
        self._cluster.ask(rank, "type", number=number, line=line)

    def _ask_to_stop(self, rank: int) -> None:
        def hear(answer: "Future[Any]") -> None:
            self.stop_policy.answered(rank)

        answer = self._cluster.interrupt(
            rank, self._number, release_after_s=timeouts.GRACE_S
        )
        answer.add_done_callback(hear)

    # ---- from the ranks ----

    def _take_events(self) -> None:
        """Handle the events in the queue; wait briefly for the first one.

        For no longer than a turn takes: ranks that print faster than it is shown are to
        be stopped all the same.
        """
        timeout = timeouts.POLL_S
        until = time.monotonic() + 2 * timeouts.POLL_S
        while self._tally.running and time.monotonic() < until:
            try:
                rank, kind, content = self._events.get(timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.0
            self.stop_policy.heard(rank, time.monotonic())
            if not self.stop_policy.is_stopping:
                self._watch.saw_life()
            if kind == "batch":
                self._listener.take_batch(rank, content)
            elif kind == "report":
                self._listener.take_report(rank, content)
            elif kind == "error":
                self._tally.add_traceback(rank, content.get("traceback", []))
            elif kind == "question":
                self._keyboard.take(rank, content)
            elif kind == "failing":
                self._tally.fail(rank)
                self._free_others(content)
            elif kind == "outcome":
                self._end(rank, content)
            elif kind == "reply":
                self._take_reply(rank, content)
            else:
                self._output.add_message(rank, kind, content)

    def _let_ask(self, running: Collection[int]) -> None:
        """Have the user answer what ranks ask; that takes none of the cell's time."""
        if self.should_end or not self._keyboard.is_due(running):
            return
        began = time.monotonic()
        self._output.finish()
        self._listener.before_question()
        if self.should_end:  # in the meantime
            return
        if not self._keyboard.ask():
            self.had_sigint = True
            self.interrupt()
            # Ranks at the prompt take no step, and so end after none alike.
            self.stop_policy.stop(time.monotonic())
        if self.stop_policy.deadline is not None:
            self.stop_policy.deadline += time.monotonic() - began
        self._watch.saw_life()

    def _take_reply(self, rank: int, reply: Any) -> None:
        if self._cluster.was_aborted(reply):
            self._send(rank)
        else:
            self.stop_policy.done(rank, time.monotonic())

    def _end_the_dead(self, now: float) -> str:
        """Give ranks that will not send one an outcome; why no rank can be reached."""
        running, policy = self._tally.running, self.stop_policy
        if lost := self._cluster.unreachable_reason():
            for rank in running:
                self._cluster.kill(rank)  # nobody could stop it later
        for rank in list(running):
            policy.heard(rank, self._cluster.late_output_at(rank))
            if not self._cluster.is_alive(rank):
                self._end(rank, self._died(rank))
            elif not self._cluster.is_cut_off(rank) and policy.is_silent(rank, now):
                self._end(rank, says_nothing(rank))
        return lost

    def _end(self, rank: int, outcome: Outcome) -> None:
        if self._tally.end(rank, outcome):
            self._free_others(outcome.status)

    def _free_others(self, status: str) -> None:
        """Stop the ranks that may wait for one that has ended with `status`."""
        if status == "interrupted" and self.is_stopping:
            return  # the others are on their way to the same step
        if status != "ok":
            self.stop_policy.fail(time.monotonic())

    def _died(self, rank: int) -> Outcome:
        death = self._cluster.death(rank)
        for name, text in death.unsent.items():
            self._output.add_message(rank, "stream", {"name": name, "text": text})
        if rank in self.stop_policy.killed:
            return Outcome(
                rank=rank,
                status="restarted",
                evalue="did not stop and was restarted: its variables are gone",
                group_in_place=False,
            )
        where = ""
        if death.line is not None:
            code = self._other_codes.get(rank, self._code)
            # IPython takes empty lines at the top of a cell away.
            lines = code.lstrip().splitlines()[death.line - 1 :]
            if lines and FUNCTION_NAME not in lines[0]:
                where = f"line {death.line}: {lines[0].strip()}"
        return Outcome(
            rank=rank,
            status="died",
            ename="the process died",
            evalue=f"{death}; {death.remedy}",
            where=where,
            group_in_place=False,
        )


def still_runs(ranks: Sequence[int], *, was_interrupted: bool) -> str:
    """What is said of ranks that have been asked to stop and have not."""
    verb, those = ("runs", "it") if len(ranks) == 1 else ("run", "them")
    again = "once more" if was_interrupted else "twice"
    return (
        f"{format_ranks(ranks)} still {verb} {timeouts.STILL_RUNS_S:g} s after the "
        "request to stop: the cell catches KeyboardInterrupt (as a bare except: does), "
        f"or is in native code or an import. Interrupt {again} to restart {those}, "
        "without variables; labkit does so at the latest "
        f"{timeouts.KILL_AFTER_S:g} s after the request."
    )


def says_nothing(rank: int) -> Outcome:
    """How a cell ended on a rank that never said so: it lost what labkit put there."""
    return Outcome(
        rank=rank,
        status="error",
        ename="the rank did not report how the cell ended",
        evalue="something in the cell has disabled labkit's hooks; "
        "%dist_restart --all restarts every rank",
        group_in_place=False,
    )
