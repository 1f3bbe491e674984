"""Engines on another host, by way of the agent there: with the face of those here."""

import contextlib
import functools
import itertools
import json
import math
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any
from typing import Protocol

from labkit import timeouts
from labkit.checks import UserError
from labkit.compat import ipyparallel as compat
from labkit.host.exit_cause import Death
from labkit.notebook.hosts.hosts import Hosts
from labkit.notebook.hosts.hosts import passed_on
from labkit.notebook.hosts.hosts import program
from labkit.notebook.hosts.launcher import ANOTHER_LAB
from labkit.notebook.hosts.launcher import HostLauncher
from labkit.notebook.kernel.output import working_directory
from labkit.records import AGENT_VARIABLE
from labkit.records import HOST_VARIABLE
from labkit.records import Placement

AGENT = "labkit.host.agent"
Ask = Callable[..., "Future[Any]"]
"""Asks an agent: the name of a question, and its arguments."""


class Reach(Protocol):
    """How agents are reached: by their numbers as engines."""

    def known(self) -> set[int]:
        """The numbers of all engines that the controller knows now."""

    def register(
        self, started: Sequence[Any], load: str, known: set[int]
    ) -> list[tuple[tuple[str, int], int]]:
        """Wait until the controller knows all that was started, besides those that it
        had `known`; what "module:name" at `load` gives on each, and its number."""

    def ask_engine(
        self, engine_id: int, who: str, question: str, **arguments: Any
    ) -> "Future[Any]":
        """Send a question that it answers also while a call runs."""

    def begin_on(self, host: "RemoteHost", function: str, *args: Any) -> Any:
        """Call "module:name"(*args) on an agent: ipyparallel's AsyncResult."""

    def wait_for(self, call: Any, host: "RemoteHost") -> Any:
        """What a call to an agent gives; UserError, with the name of its host, where it
        fails."""


class Answers(Protocol):
    """What answers questions about the engines of a host."""

    name: str
    """As the launcher has it."""

    @property
    def ask(self) -> Ask:
        """Asks, and does not wait."""

    @property
    def is_cut_off(self) -> bool:
        """Whether the host has not answered for some seconds."""

    def answer(self, question: str, **arguments: Any) -> Any:
        """What is answered to a question that takes no time; UserError where nothing
        is."""


class RemoteHost:
    """What a lab has on another host, whose agent answers questions."""

    def __init__(
        self, name: str, engine_id: int, ask: Ask, program: "StartedAgent"
    ) -> None:
        """`name` is as the launcher has it, `engine_id` the agent's; `program` is what
        has started it."""
        self.name = name
        self.engine_id = engine_id
        self.ask = ask
        self._program = program
        self._engines: dict[int, RemoteEngine] = {}
        self._asked: list[Future[Any]] = []
        self._asked_at = self._looked_at = time.monotonic()
        self._silent_s = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether it has not answered for long: its ranks count as dead."""
        return self._silent_s > timeouts.LOST_S or self._program.has_ended

    @property
    def is_cut_off(self) -> bool:
        """Whether it has not answered lately: what is sent to it may wait."""
        return self._silent_s > timeouts.CUT_OFF_S

    @property
    def is_alive(self) -> bool:
        """Whether it answers, or has until a moment ago."""
        return not self.is_lost

    def death(self) -> str:
        """Why it does not, in words."""
        return self._program.why_ended() or (
            f"its host {self.name} is gone or cut off: it has not answered for "
            f"{timeouts.LOST_S:g} s"
        )

    def engine(self, pid: int, stack_file: str) -> "RemoteEngine":
        """The engine that the agent has forked as this process."""
        self._engines[pid] = RemoteEngine(self, pid, stack_file)
        return self._engines[pid]

    def end_forked(self, call: "Future[Any]") -> None:
        """End the engines that a call has had the agent fork."""
        if call.cancelled() or call.exception() is not None:
            return
        for pid, _ in call.result():
            with contextlib.suppress(OSError, RuntimeError):  # it is gone
                self.ask("kill", pid=pid, why="ended by labkit")

    def look(self) -> None:
        """Take in what the agent has said of its engines, and ask it again; to be
        called now and then, which does not wait."""
        for each in [each for each in self._asked if each.done()]:
            self._asked.remove(each)
            with contextlib.suppress(CancelledError, RuntimeError):
                self._take(each.result())
        now = time.monotonic()
        # Of a notebook that was stopped, or held the GIL, one look counts for no more
        # than one question does.
        self._silent_s += min(now - self._looked_at, timeouts.ASK_S)
        self._looked_at = now
        if self._asked and now - self._asked_at < timeouts.ASK_S:
            return
        # What was asked while it could not be reached is never answered.
        del self._asked[: -int(timeouts.LOST_S)]
        try:
            self._asked.append(self.ask("look"))
        except RuntimeError:
            # It has ended, and has told the controller: it heard no more of it.
            self._silent_s = math.inf
        self._asked_at = now
        if self.is_lost and any(each.is_alive for each in self._engines.values()):
            gone = self._program.why_gone() if self._program.has_ended else ""
            self.give_up(gone or self.death(), ANOTHER_LAB if gone else Death.remedy)

    def give_up(self, cause: str, remedy: str = Death.remedy) -> None:
        """Count its engines as dead."""
        for engine in list(self._engines.values()):
            engine.set_ended(cause, remedy)

    def _take(self, deaths: dict[str, Any]) -> None:
        self._silent_s = 0.0
        for pid, engine in list(self._engines.items()):
            if (told := deaths.get(str(pid))) is not None:
                death = Death(**told)
                # As Slurm ends all of a job.
                if "SIGTERM" in death.cause and (why := self._program.why_gone()):
                    death = replace(death, cause=why, remedy=ANOTHER_LAB)
                engine.set_death(death)
                del self._engines[pid]
            elif not engine.is_alive:  # it was given up, with its host, which is back
                engine.kill()

    def answer(self, question: str, **arguments: Any) -> Any:
        """What the agent says to a question, which takes it no time."""
        try:
            return self.ask(question, **arguments).result(timeouts.ANSWER_S)
        except (CancelledError, TimeoutError) as error:
            raise UserError(
                f"host {self.name} has not answered within {timeouts.ANSWER_S:g} s"
            ) from error


class RemoteEngine:
    """An engine on another host: as `EngineProcess`."""

    def __init__(self, host: Answers, pid: int, stack_file: str) -> None:
        self.host = host
        self.pid = pid
        self.key = host.name, pid
        self.stack_file = stack_file
        """There: where it writes its Python stack when it is sent `DUMP_SIGNAL`."""
        self.expected_cause = ""
        """Why it is about to end, where that is known beforehand."""
        self._death: Death | None = None
        self._has_ended = threading.Event()

    @property
    def is_alive(self) -> bool:
        return not self._has_ended.is_set()

    @property
    def is_cut_off(self) -> bool:
        return self.host.is_cut_off

    def set_death(self, death: Death) -> None:
        """Note how it has ended; the first word counts."""
        if self._death is None:
            self._death = death
        self._has_ended.set()

    def set_ended(self, cause: str, remedy: str = Death.remedy) -> None:
        """Note that it has ended, as far as is known, and what to do about it."""
        self.set_death(Death(self.pid, cause, time.time(), None, remedy))

    def send(self, signum: int) -> None:
        """Send it a signal, if it is there still."""
        self.host.ask("signal", pid=self.pid, signum=int(signum))

    def kill(self) -> None:
        """Send it SIGKILL."""
        why = self.expected_cause or "ended by labkit"
        self.host.ask("kill", pid=self.pid, why=why)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or this time is over."""
        self._has_ended.wait(timeout_s)

    def death(self) -> Death:
        """How it ended. Waits 2 s at most for its host to say so."""
        self.wait(timeouts.REAP_S)
        if self._death is None:
            why = "no longer known to the controller"
            return Death(self.pid, why, time.time(), None)
        return self._death

    def stall_reason(self) -> str:
        """Why it does not answer although it is there, in words."""
        with contextlib.suppress(RuntimeError):
            return str(self.host.answer("stall_reason", pid=self.pid))
        return f"its host {self.host.name} does not answer either"

    def ask_for_dump(self) -> None:
        """Have it write its stack; native code that holds the GIL or not."""
        self.host.ask("ask_for_dump", pid=self.pid)

    def dumped_stack(self) -> str:
        """What it wrote then."""
        with contextlib.suppress(RuntimeError):
            return str(self.host.answer("dumped_stack", pid=self.pid))
        return ""

    def log(self) -> str:
        """What it printed outside of cells; "" where that was nothing."""
        with contextlib.suppress(RuntimeError):
            return str(self.host.answer("log", pid=self.pid))
        return ""


class RemoteEngines:
    """Starts engines on other hosts, by way of an agent on each."""

    def __init__(
        self,
        hosts: Hosts,
        placements: Sequence[Placement],
        environment: dict[str, str],
        reach: Reach,
    ) -> None:
        """`environment` is what engines have besides their host's own."""
        self._place(hosts, placements)
        self._patience_s = hosts.patience_s
        self._environment = environment
        self._reach = reach
        self._hosts: dict[str, RemoteHost] = {}
        self._left: list[RemoteHost] = []
        """Lost, and used no more: their agents end when they are back."""
        self._folders: dict[str, list[str]] = {}
        """Of all agents on each."""
        self._numbers = itertools.count(1)

    def _place(self, hosts: Hosts, placements: Sequence[Placement]) -> None:
        """From now on ranks start in these places."""
        self._launcher = hosts.launcher
        self._facts = {each.spec.name: each.facts for each in hosts.found}
        self._host_of = {each.rank: each.host for each in placements}

    def move(
        self, hosts: Hosts | None, placements: Sequence[Placement]
    ) -> Callable[[], None]:
        """From now on ranks start in these places; what takes that back."""
        assert hosts is not None
        former = self._launcher, self._facts, self._host_of
        self._place(hosts, placements)

        def go_back() -> None:
            self._launcher, self._facts, self._host_of = former

        return go_back

    def leave_unused(self) -> None:
        """End everything on the hosts on which no rank is to be, and their agents."""
        self._leave([name for name in self._hosts if name not in self._facts])

    def _leave(self, names: Sequence[str]) -> None:
        hosts = [self._hosts.pop(name) for name in names]
        self._left += [host for host in hosts if host.is_lost]
        self._end([host for host in hosts if not host.is_lost])
        for host in hosts:
            host.give_up("its host is no longer used")

    def prepare(self, cluster: Any, on_progress: Callable[[str], None]) -> None:
        """Start an agent on each host that has none, or is lost; it begins to load
        torch."""
        self._launcher.check()
        names = [
            name
            for name in self._facts
            if name not in self._hosts or self._hosts[name].is_lost
        ]
        if not names:
            return
        on_progress(f"starting an agent on {', '.join(names)}")
        for name in names:
            if name in self._hosts:  # where it lives, it is of no use any more
                with contextlib.suppress(RuntimeError):
                    self._hosts[name].ask("exit")
        folders = {
            name: str(Path(self._facts[name].folder, f"labkit-{uuid.uuid4().hex}"))
            for name in names
        }
        common = passed_on()
        environments = {name: {**common, **self._own(name)} for name in names}
        for name, folder in folders.items():
            self._folders.setdefault(name, []).append(folder)
        known = self._reach.known()
        command = program(AGENT)
        with compat.starting_programs(
            cluster,
            folders,
            command_of=lambda name: self._launcher.command(name, command),
            environments=environments,
        ) as launchers:
            begun = {
                name: StartedAgent(name, each, self._launcher)
                for name, each in zip(names, launchers, strict=True)
            }
            found = self._reach.register([*begun.values()], f"{AGENT}:load", known)
            for (name, _), engine_id in found:
                ask = functools.partial(
                    self._reach.ask_engine, engine_id, f"host {name}"
                )
                self._hosts[name] = RemoteHost(name, engine_id, ask, begun[name])

    def _own(self, name: str) -> dict[str, str]:
        """The variables that only the processes on this host have."""
        interface = self._facts[name].interface
        told = {
            "directory": working_directory() or "/",
            "environment": self._environment,
            "former": self._folders.get(name, []),
            "patience_s": self._patience_s,
        }
        return {
            HOST_VARIABLE: name,
            AGENT_VARIABLE: json.dumps(told),
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            # "=": and none whose name begins like it.
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", f"={interface}"),
        }

    @contextlib.contextmanager
    def starting(self, cluster: Any, ranks: Sequence[int]) -> Iterator[list[Any]]:
        """A `RemoteEngine` for each of `ranks`; they are ended where what is done with
        them fails."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._host_of[rank], []).append(rank)
        calls: dict[str, Any] = {}
        try:
            for name, here in by_host.items():
                names = [f"{next(self._numbers)}" for _ in here]
                host = self._hosts[name]
                calls[name] = self._reach.begin_on(host, f"{AGENT}:fork", names)
            started: dict[int, RemoteEngine] = {}
            for name, call in calls.items():
                host = self._hosts[name]
                forked = self._reach.wait_for(call, host)
                for rank, (pid, stack_file) in zip(by_host[name], forked, strict=True):
                    started[rank] = host.engine(pid, stack_file)
            yield [started[rank] for rank in ranks]
        except BaseException:
            for name, call in calls.items():  # now, or once it has forked them
                call.add_done_callback(self._hosts[name].end_forked)
            raise

    def log(self) -> str:
        """What was printed by what forks engines."""
        said = []
        for host in self._hosts.values():
            with contextlib.suppress(RuntimeError):
                said.append(host.answer("fork_log"))
        return "\n".join(filter(None, said))

    def look(self) -> None:
        """Ask every agent how its engines are."""
        for host in [*self._hosts.values(), *self._left]:
            # The controller has just ended, or the user has closed the client.
            with contextlib.suppress(OSError, RuntimeError):
                host.look()
        for host in [each for each in self._left if not each.is_lost]:
            self._left.remove(host)
            with contextlib.suppress(OSError, RuntimeError):
                host.ask("exit")

    def end_sessions(self, engines: Sequence[Any]) -> None:
        """End what is left of what engines have started."""
        self._launcher.check()
        pids: dict[str, list[int]] = {}
        for each in engines:
            pids.setdefault(each.host.name, []).append(each.pid)
        for name, ended in pids.items():
            if not self._hosts[name].is_lost:
                self._hosts[name].answer("end_sessions", pids=ended)

    def free_port(self, rank: int) -> int:
        """A port on which nobody listens, on the host of a rank."""
        return int(self._hosts[self._host_of[rank]].answer("free_port"))

    def hosts_without(self, folder: Path) -> list[str]:
        """The hosts that do not share a folder of this one: a file that is written
        here is not there. OSError where none can be written."""
        with tempfile.NamedTemporaryFile(prefix=".labkit-", dir=folder) as file:
            asked = {
                name: self._hosts[name].ask("has", path=file.name)
                for name in self._facts
            }
            wait(asked.values(), timeouts.ANSWER_S)
            return [
                name
                for name, answer in asked.items()
                if not answer.done() or answer.cancelled() or not answer.result()
            ]

    def end(self) -> None:
        """End everything on every host that answers, and its agent. On one that does
        not, an agent ends by itself when it hears no more of the controller."""
        self._leave([*self._hosts])

    def _end(self, hosts: Sequence[RemoteHost]) -> None:
        calls = []
        for host in hosts:
            with contextlib.suppress(UserError):  # it is gone
                calls.append(self._reach.begin_on(host, f"{AGENT}:end"))
        deadline = time.monotonic() + timeouts.END_HOST_S
        for call in calls:
            call.wait(max(deadline - time.monotonic(), 0))

    @property
    def ends_at(self) -> float | None:
        """When all hosts are taken back, in seconds since the epoch; None for never."""
        return self._launcher.ends_at


class StartedAgent:
    """The command line here that has started an agent, as `EngineProcess`."""

    def __init__(self, host: str, launcher: Any, launches: HostLauncher) -> None:
        """`launcher` is ipyparallel's, of a command line that `launches` has made."""
        self._host = host
        self._launcher = launcher
        self._waiter = compat.waiter_of(launcher)
        self._launches = launches
        self._why_ended = ""

    @property
    def is_alive(self) -> bool:
        return self._waiter.is_alive()

    @property
    def has_ended(self) -> bool:
        """Whether the agent has ended, as far as the command line says."""
        return self._launches.ends_with_program and not self.is_alive

    def death(self) -> str:
        """Why the command line has ended, in words."""
        return self.why_ended() or f"what has started it on {self._host} has ended"

    def why_ended(self) -> str:
        """Why it has ended; "" where it has not, as far as is known."""
        if self.has_ended and not self._why_ended:
            self._why_ended = self.why_gone() or (
                f"its host {self._host} is gone, or its agent was ended there"
            )
        return self._why_ended

    def why_gone(self) -> str:
        """Why all hosts are gone at once; "" where they are not, as far as is known."""
        return self._launches.why_gone(self._said())

    def log(self) -> str:
        """What it printed, with the name of its host."""
        return f"{self._host}: {self._said() or '(nothing)'}"

    def _said(self) -> str:
        try:
            file = Path(self._launcher.output_file)
            return file.read_text(errors="replace").strip()
        except OSError:  # it has ended, and ipyparallel has taken what it printed
            return str(self._launcher.get_output()).strip()
