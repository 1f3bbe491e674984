"""Reaches engines by rank: cells, calls, questions and signals."""

import abc
import contextlib
import signal
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ipyparallel

from labkit import timeouts
from labkit.call_by_name import call_by_name
from labkit.checks import UserError
from labkit.compat import ipyparallel as compat
from labkit.host.exit_cause import Death
from labkit.host.exit_cause import EngineProcess
from labkit.key_server import Meeting
from labkit.messages import is_message
from labkit.notebook.hosts.remote import RemoteEngine
from labkit.notebook.hosts.remote import RemoteHost
from labkit.notebook.kernel import interrupts
from labkit.rank_spec import format_ranks
from labkit.records import KEY
from labkit.records import Outcome

Engine = EngineProcess | RemoteEngine
OnMessage = Callable[[str, dict[str, Any]], None]
OnLateOutput = Callable[[int, str, dict[str, Any]], None]


class CallError(UserError):
    """A call of labkit's own failed on a rank."""


class RankDiedError(CallError):
    """A rank's process has ended, or none of them can be reached."""


class SilentRankError(CallError):
    """A rank is alive and does not answer, so the state of its call is unknown."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(
            f"rank {rank} has not answered for {timeouts.SILENCE_S:g} s: {why}; it "
            "keeps its variables: try again when %dist_status says that it answers"
        )


class Engines(abc.ABC):
    """Engines by the rank that each is: those of a lab, or of a part of it.

    A rank is a number from 0 here, whatever number the engine has elsewhere.
    """

    @property
    @abc.abstractmethod
    def ranks(self) -> Sequence[int]:
        """All of them."""

    @abc.abstractmethod
    def engine(self, rank: int) -> Engine:
        """The process of a rank."""

    @abc.abstractmethod
    def engine_id(self, rank: int) -> int:
        """The number by which ipyparallel knows it."""

    @property
    @abc.abstractmethod
    def client(self) -> Any:
        """ipyparallel's; None before the first engine has started, and at the end."""

    @abc.abstractmethod
    def unreachable_reason(self) -> str:
        """Why no rank can be reached any more; "" while they can."""

    @abc.abstractmethod
    def start_engines(
        self, ranks: Sequence[int], *, on_progress: Callable[[str], None]
    ) -> None:
        """Start an engine for each of `ranks`, and wait until it can be a rank."""

    @abc.abstractmethod
    def end_engines(self, ranks: Sequence[int]) -> None:
        """Kill the engines of `ranks` and what they started; wait for their end."""

    @abc.abstractmethod
    def listen(self, rank: int) -> None:
        """Hear what is printed on the rank while no cell runs."""

    @abc.abstractmethod
    def show_late_output(self, show: OnLateOutput) -> None:
        """Have `show` called, in the client's thread, with what ranks print between
        two cells."""

    @abc.abstractmethod
    def late_output_at(self, rank: int) -> float:
        """When the last of that came from the rank, by the monotonic clock. What it
        has sent later, as the outcome of a cell, comes behind it."""

    @abc.abstractmethod
    def open_store(self) -> Meeting:
        """Serve an empty store, in place of the former one; where ranks find it."""

    @abc.abstractmethod
    def free_port(self, rank: int) -> int:
        """A port on which nobody listens, at the address of a rank."""

    @property
    @abc.abstractmethod
    def is_local(self) -> bool:
        """Whether all ranks are on the notebook's own host."""

    @property
    @abc.abstractmethod
    def ends_at(self) -> float | None:
        """When all hosts are taken back, in seconds since the epoch; None for never."""

    @abc.abstractmethod
    def hosts_without(self, folder: Path) -> list[str]:
        """The hosts that do not share a folder of this one, which exists."""

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: self.engine(rank).pid for rank in self.ranks}

    def is_alive(self, rank: int) -> bool:
        """Whether the rank's process runs and the controller knows it."""
        return self.client is not None and (
            self.engine_id(rank) in self.client.ids and self.engine(rank).is_alive
        )

    def is_cut_off(self, rank: int) -> bool:
        """Whether what is sent to it may wait: its host has not answered lately."""
        return self.engine(rank).is_cut_off

    def death(self, rank: int) -> Death:
        """How a rank that is not alive has ended."""
        return self.engine(rank).death()

    def execute(
        self, rank: int, code: str, metadata: dict[str, Any], on_message: OnMessage
    ) -> "Future[Any]":
        """Run `code` in the rank's shell; a future that is done when it has replied.

        `on_message(kind, content)` is called, in the client's thread, with what the
        rank sends meanwhile, in order: IPython's iopub messages ("stream",
        "display_data", "error", ...) and labkit's own ("batch", "outcome"). The outcome
        of a cell that has published nothing comes within the reply.
        RankDiedError where the controller does not know the rank any more.
        """
        client = self.client

        def take(msg_id: str, kind: str, value: Any) -> None:
            on_message(kind, value)
            if kind == "outcome":  # a cell's last
                compat.end_output(client, msg_id)

        def hear_reply(msg_id: str, content: dict[str, Any]) -> None:
            with contextlib.suppress(TypeError):  # the fields are not those
                if fields := content.get(KEY):
                    outcome = Outcome(**fields)
                    if is_message(("outcome", outcome), rank):
                        take(msg_id, "outcome", outcome)

        def receive(msg: dict[str, Any]) -> None:
            kind = msg["header"]["msg_type"]
            msg_id = msg["parent_header"]["msg_id"]
            kept = client.metadata[msg_id]
            if kind == "data_message":
                data = dict(kept["data"])
                kept["data"].clear()
                if is_message(data.get(KEY), rank):
                    take(msg_id, *data[KEY])
                return
            if kind == "stream":
                # The client joins all of it again at every message: not needed.
                kept[msg["content"]["name"]] = ""
            kept["outputs"].clear()
            on_message(kind, msg["content"])

        return compat.send_cell(
            client, self._ident(rank), code, {KEY: metadata}, receive, hear_reply
        )

    def call(
        self,
        function: str,
        *args: Any,
        ranks: Sequence[int],
        timeout_s: float | None = timeouts.CALL_S,
        is_collective: bool = False,
    ) -> list[Any]:
        """What "module:name"(*args) returns on each of `ranks`.

        By name, so that this process need not import what runs on ranks. With no
        timeout it may take as long as the ranks answer other questions meanwhile. A
        collective ends with the first failure, which leaves others waiting in it.

        Raises the ValueError that a rank raised, RankDiedError as soon as one of them
        is dead, SilentRankError where one does not answer any more, and CallError for
        all else.
        """
        name = function.split(":")[1]
        try:
            reply = self.begin(function, *args, ranks=ranks)
            if timeout_s is None:
                self._wait_while_answering(reply, ranks, is_collective)
            else:
                engines = [self.engine(rank) for rank in ranks]
                self._wait(reply, engines, timeout_s, is_collective)
            return reply.get()
        except (TimeoutError, ipyparallel.error.IPythonError) as error:
            self._check([self.engine(rank) for rank in ranks])
            where = "the ranks"
            if isinstance(error, ipyparallel.error.CompositeError):
                # What the first that failed said, without ipyparallel's frame of it.
                ename, evalue, _, engine = error.elist[0]
                if ename == "ValueError":  # of what the user gave: the rank is well
                    raise ValueError(evalue) from None
                if ename == "EngineError":  # the controller knows before the system
                    known = self.client.ids
                    gone = [r for r in ranks if self.engine_id(r) not in known]
                    who = format_ranks(gone or ranks)
                    raise RankDiedError(f"{who} died a moment ago") from None
                where = format_ranks(
                    r for r in ranks if self.engine_id(r) == engine["engine_id"]
                )
                error = RuntimeError(f"{ename}: {evalue}")
            raise CallError(f"{name} failed on {where}: {error}") from error

    def begin(self, function: str, *args: Any, ranks: Sequence[int]) -> Any:
        """Like `call`, but does not wait: ipyparallel's AsyncResult."""
        self._check([self.engine(rank) for rank in ranks])
        engines = [self.engine_id(rank) for rank in ranks]
        try:
            view = self.client[engines]
        except (IndexError, ipyparallel.error.NoEnginesRegistered):
            raise RankDiedError(f"{format_ranks(ranks)} died a moment ago") from None
        return view.apply_async(call_by_name, function, args)

    def _wait(
        self,
        reply: Any,
        engines: Iterable[Engine | RemoteHost],
        timeout_s: float,
        is_collective: bool = False,
    ) -> None:
        """Wait for an AsyncResult, but not for the dead."""
        deadline = time.monotonic() + timeout_s
        while not reply.wait(timeouts.POLL_S):
            interrupts.check()
            self._check(engines)
            if is_collective:
                raise_failures(reply)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {timeout_s:g} s")

    def _wait_while_answering(
        self, reply: Any, ranks: Sequence[int], is_collective: bool
    ) -> None:
        """Wait for an AsyncResult for as long as all of `ranks` answer."""
        watch = SilenceWatch(ranks, lambda rank: self.ask(rank, "describe"))
        while not reply.wait(timeouts.POLL_S):
            interrupts.check()
            self._check([self.engine(rank) for rank in ranks])
            if is_collective:
                raise_failures(reply)
            for rank in watch.silent():
                raise SilentRankError(rank, self.engine(rank).stall_reason())

    def _check(self, engines: Iterable[Engine | RemoteHost]) -> None:
        """RankDiedError unless these live and can be reached."""
        if reason := self.unreachable_reason():
            raise RankDiedError(reason)
        for engine in engines:
            if not engine.is_alive:
                ranks = [r for r in self.ranks if self.engine(r) is engine]
                who = f"rank {ranks[0]}" if ranks else "an engine"
                raise RankDiedError(f"{who} died: {engine.death()}")

    def ask(self, rank: int, request: str, **arguments: Any) -> "Future[Any]":
        """Send a request that the rank answers also while it runs a cell.

        It is one of those that `labkit.rank.engine.requests.ControlRequests` answers.
        The future's result is the answer, or a CallError; it is cancelled where the
        rank is dead.
        """
        try:
            if self.unreachable_reason() or not self.is_alive(rank):
                raise RankDiedError
            engine_id = self.engine_id(rank)
            return ask_engine(
                self.client, engine_id, f"rank {rank}", request, arguments
            )
        except RankDiedError:
            answer: Future[Any] = Future()
            answer.cancel()
            return answer

    def interrupt(
        self, rank: int, number: int, release_after_s: float
    ) -> "Future[Any]":
        """Ask the rank to stop the cell whose spec has this number; the future is done
        when it knows."""
        return self.ask(
            rank, "interrupt", number=number, release_after_s=release_after_s
        )

    def signal(self, rank: int) -> None:
        """Stop the rank's Python code, but no collective, by a signal of the system."""
        self.engine(rank).send(signal.SIGINT)

    def kill(self, rank: int, why: str = "ended by labkit") -> None:
        """End the rank's process at once; `why` is then the cause of its death."""
        end_at_once(self.engine(rank), why)

    def was_aborted(self, reply: Any) -> bool:
        """Whether the kernel discarded a request: it does so right after an error."""
        return isinstance(reply, ipyparallel.error.TaskAborted)

    def _ident(self, rank: int) -> bytes:
        try:
            return compat.ident_of(self.client, self.engine_id(rank))
        except (IndexError, ipyparallel.error.NoEnginesRegistered):
            raise RankDiedError(f"rank {rank} died a moment ago") from None


def raise_failures(reply: Any) -> None:
    """Raise what has failed so far of a collective: the others would wait for it.

    Not that a rank has died: how it did is known in a moment.
    """
    errors = [each.exception() for each in reply.split() if each.done()]
    ipyparallel.error.collect_exceptions(
        [each for each in errors if getattr(each, "ename", "") != "EngineError"]
    )


def end_at_once(engine: Engine, why: str = "ended by labkit") -> None:
    """Kill an engine that is alive; `why` is then the cause of its death."""
    if engine.is_alive:
        engine.expected_cause = why
        engine.kill()


def ask_engine(
    client: Any, engine_id: int, who: str, question: str, arguments: dict[str, Any]
) -> "Future[Any]":
    """Send an engine, `who` in words, a question that it answers also while it runs
    something. RankDiedError where the controller does not know it any more."""
    try:
        ident = compat.ident_of(client, engine_id)
    except (IndexError, ipyparallel.error.NoEnginesRegistered):
        raise RankDiedError(f"{who} died a moment ago") from None
    answer: Future[Any] = Future()

    def take(future: Any) -> None:
        reply = future.result()["content"]
        if reply["status"] == "ok":
            answer.set_result(reply["answer"])
        else:
            why = f"{who} cannot answer {question!r}: {reply['why']}"
            answer.set_exception(CallError(why))

    content = {"request": question, "arguments": arguments}
    compat.send_request(client, ident, f"{KEY}_request", content).add_done_callback(
        take
    )
    return answer


class SilenceWatch:
    """Asks ranks again and again, so that a long wait ends with the last answer.

    What a rank does may take any time as long as its control thread answers. A dead one
    is not asked, and not waited for either.
    """

    def __init__(
        self, ranks: Sequence[int], ask: Callable[[int], "Future[Any]"]
    ) -> None:
        self._ask = ask
        self._answers: dict[int, Future[Any]] = {}
        self._silent_s = dict.fromkeys(ranks, 0.0)
        self._looked_at: float | None = None

    def silent(self, now: float | None = None) -> list[int]:
        """The ranks that have not answered for `SILENCE_S`; to be called often."""
        now = time.monotonic() if now is None else now
        # Of a machine that slept, or a notebook that was stopped, one look counts for
        # no more than one question does.
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        passed = min(passed, timeouts.ASK_S)
        self._looked_at = now
        for rank in self._silent_s:
            self._silent_s[rank] += passed
            answer = self._answers.get(rank)
            if answer is None or (
                answer.done() and self._silent_s[rank] >= timeouts.ASK_S
            ):
                self._answers[rank] = self._ask(rank)
                self._silent_s[rank] = 0.0
        return [
            rank
            for rank, silent_s in self._silent_s.items()
            if silent_s >= timeouts.SILENCE_S and not self._answers[rank].done()
        ]
