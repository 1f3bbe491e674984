"""A kernel's end of the connection to the keeper of its lab."""

import contextlib
import itertools
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import psutil

from labkit import timeouts
from labkit.checks import UserError
from labkit.host.exit_cause import Death
from labkit.json_files import parse
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.cluster.placement import check_launcher
from labkit.notebook.cluster.reach import CallError
from labkit.notebook.cluster.reach import RankDiedError
from labkit.notebook.hosts.remote import RemoteEngine
from labkit.notebook.keeper.kept_labs import choose
from labkit.notebook.keeper.kept_labs import place
from labkit.notebook.keeper.lines import Lines
from labkit.notebook.keeper.lines import peer_of
from labkit.notebook.kernel import interrupts
from labkit.options import check_values
from labkit.records import Placement

KEEPER = "labkit.notebook.keeper.keeper"
_ERRORS = {
    each.__name__: each
    for each in (ValueError, OSError, KeyboardInterrupt, CallError, RankDiedError)
}
"""What the keeper raised is raised here; all else as a UserError."""


class Answer(Future[Any]):
    """What the keeper says to a question."""

    stage = ""
    """How far it is, in words."""


class Attachment:
    """The connection; the lab outlives it."""

    def __init__(
        self,
        connection: socket.socket,
        keeper: psutil.Process,
        placements: Sequence[Placement],
    ) -> None:
        self.keeper = keeper
        """The process at the other end."""
        self.name = f"lab-{keeper.pid}"
        """That of the lab, for `%dist_attach`."""
        self.placements = list(placements)
        self.keep_minutes = 0.0
        """How long the lab lives without a kernel."""
        self.launcher = "local"
        self.found: dict[str, Any] | None = None
        """The cluster that there was when this kernel came; None for none."""
        self.unreachable = ""
        """Why no rank can be reached."""
        self.cut_off: list[str] = []
        """The hosts that have not answered for some seconds."""
        self._lines = Lines(connection)
        self._numbers = itertools.count(1)
        self._asked: dict[int, Answer] = {}
        self._engines: dict[tuple[str, int], RemoteEngine] = {}
        self._deaths: dict[tuple[str, int], Death] = {}
        self.is_closed = False
        self._asking = threading.Lock()
        self._reader = threading.Thread(
            target=self._hear, name="labkit-keeper", daemon=True
        )
        self._reader.start()

    # ---- questions ----

    def ask(self, question: str, **arguments: Any) -> Answer:
        """Ask the keeper; the answer, or the exception that it raised."""
        answer, number = Answer(), next(self._numbers)
        with self._asking:
            if self.is_closed:
                answer.set_exception(UserError(self.gone()))
                return answer
            self._asked[number] = answer
        with contextlib.suppress(OSError):  # it is gone, which `_hear` notices
            self._lines.send(
                {"id": number, "question": question, "arguments": arguments}
            )
        return answer

    def call(
        self,
        question: str,
        *,
        on_progress: Callable[[str], None] = lambda text: None,
        **arguments: Any,
    ) -> Any:
        """Ask the keeper, and wait; an interrupt here is one there, and is waited for
        as well."""
        answer, stage = self.ask(question, **arguments), ""
        try:
            while not answer.done():
                interrupts.check()
                if answer.stage != stage:
                    stage = answer.stage
                    on_progress(stage)
                with contextlib.suppress(TimeoutError):
                    answer.exception(timeouts.POLL_S)
        except BaseException:
            self.ask("interrupt")
            with contextlib.suppress(TimeoutError):
                answer.exception(timeouts.END_HOST_S)
            raise
        return answer.result()

    def gone(self) -> str:
        """Why the keeper cannot be asked any more."""
        return (
            f"the process that keeps the lab (its keeper, {self.keeper.pid}) has "
            "ended, and its ranks end too; %dist_stop, then %dist_start --keep, starts "
            "another"
        )

    def begin_anew(self) -> None:
        """Another cluster has been started: what was known of the former is over."""
        self._engines.clear()
        self._deaths.clear()
        with self._asking:
            if not self.is_closed:
                self.unreachable = ""

    def know(self, engine: RemoteEngine) -> None:
        """Have the end of an engine noted, now or when it comes."""
        self._engines[engine.key] = engine
        if (death := self._deaths.get(engine.key)) is not None:
            engine.set_death(death)
        elif self.is_closed:
            engine.set_ended(self.gone())

    def _hear(self) -> None:
        """In a thread: take what the keeper says until it is gone."""
        for message in self._lines:
            if "ended" in message:
                key = message["ended"][0], message["ended"][1]
                self._deaths[key] = parse(Death, message["death"])
                if key in self._engines:
                    self._engines[key].set_death(self._deaths[key])
            elif "unreachable" in message:
                self.unreachable = message["unreachable"]
                self.cut_off = message["cut_off"]
            elif "stage" in message:
                self._asked[message["id"]].stage = message["stage"]
            elif "error" in message:
                kind = _ERRORS.get(message["error"], UserError)
                self._asked.pop(message["id"]).set_exception(kind(message["words"]))
            else:
                self._asked.pop(message["id"]).set_result(message["answer"])
        with self._asking:
            self.is_closed = True
            self.unreachable = self.gone()
        for answer in self._asked.values():
            answer.set_exception(UserError(self.gone()))
        for engine in list(self._engines.values()):
            if engine.is_alive:
                engine.set_ended(self.gone())

    # ---- the end ----

    def detach(self) -> str:
        """Leave the lab to the next kernel, or to its end; in words."""
        self._lines.close()
        self._reader.join()
        return f"{self.name} is left as it is"

    def close(self) -> None:
        """End the lab and its keeper; wait until it has ended."""
        if not self.is_closed:
            self.ask("interrupt")
            self.ask("end")
            self._reader.join(timeouts.END_HOST_S + timeouts.END_JOB_S)
        self.detach()
        with contextlib.suppress(psutil.Error):
            self.keeper.kill()  # it has ended, unless something hangs
            self.keeper.wait(timeouts.END_S)


def start_keeper(
    options: StartOptions, on_progress: Callable[[str], None]
) -> Attachment:
    """A keeper for a lab that is yet to start, placed as `place_on_hosts` does it; it
    raises what that raises."""
    check_values(options)
    check_launcher(options)
    ours, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as said:
        process = psutil.Popen(
            [sys.executable, "-P", "-m", KEEPER],
            stdin=theirs.fileno(),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        theirs.close()
        on_progress("starting the lab's keeper")
        attachment = Attachment(ours, process, [])
        attachment.launcher = options.started_by
        attachment.keep_minutes = float(options.keep or 0)
        try:
            attachment.call("attach", pid=os.getpid())
            placements = attachment.call(
                "place", options=asdict(options), on_progress=on_progress
            )
        except BaseException as error:
            has_died = attachment.is_closed
            attachment.close()
            said.seek(0)
            words = said.read().decode(errors="replace").strip()
            if has_died and words and isinstance(error, UserError):
                raise UserError(f"the lab's keeper did not start: {words}") from error
            raise
    attachment.placements = [parse(Placement, each) for each in placements]
    return attachment


def attach(name: str | None) -> Attachment:
    """The kept lab of that name, or the only one, for this kernel alone; UserError
    where that cannot be."""
    folder, lab = choose(name)
    try:
        connection = place(folder).connect()
        keeper = psutil.Process(peer_of(connection, lab.keeper))
    except (OSError, psutil.Error) as error:
        raise UserError(f"{lab.name} has just ended: {error}") from error
    attachment = Attachment(connection, keeper, lab.placements)
    try:
        attachment.launcher = lab.launcher
        attachment.keep_minutes = lab.keep_minutes
        attachment.found = found = attachment.call("attach", pid=os.getpid())
        if not found:
            raise UserError(f"{lab.name} has just ended")
        attachment.unreachable = attachment.unreachable or found["unreachable"]
    except BaseException:
        attachment.detach()
        raise
    return attachment
