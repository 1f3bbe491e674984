"""The engines of a lab, or of a part of it: started, reached by rank, and ended."""

import abc
import contextlib
import errno
import itertools
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from typing import Protocol

import ipyparallel

from labkit import timeouts
from labkit.call_by_name import call_by_name
from labkit.checks import UserError
from labkit.checks import absolute
from labkit.compat import ipyparallel as compat
from labkit.host.exit_cause import EngineProcess
from labkit.host.processes import Host
from labkit.key_server import KeyServer
from labkit.key_server import Meeting
from labkit.notebook.cluster.local import LocalEngines
from labkit.notebook.cluster.local import watched
from labkit.notebook.cluster.reach import Engine
from labkit.notebook.cluster.reach import Engines
from labkit.notebook.cluster.reach import OnLateOutput
from labkit.notebook.cluster.reach import RankDiedError
from labkit.notebook.cluster.reach import ask_engine
from labkit.notebook.cluster.reach import end_at_once
from labkit.notebook.hosts.hosts import Hosts
from labkit.notebook.hosts.remote import RemoteEngines
from labkit.notebook.hosts.remote import RemoteHost
from labkit.notebook.kernel import interrupts
from labkit.records import HOST_VARIABLE
from labkit.records import KEY
from labkit.records import SAFE_PATH
from labkit.records import Placement

_CONTROLLER_ARGS = [
    # A rank that holds the GIL for long must not count as dead: the host reports the
    # dead.
    "--HeartMonitor.max_heartmonitor_misses=10000",
    "--IPController.use_threads=True",
    "--nodb",  # it would keep what each cell sent and got, and copy it each time
    "--log-level=ERROR",
]
_LOAD = "labkit.rank.engine.rpc:load"
_TAKEN = "Address already in use"
_REGISTERED = "Completed registration"
"""What an engine says when the controller knows it."""
_START_TRIES = 3
_NUM_PORTS = 100
"""As many as a lab takes and some more: it listens on some 20, and among few that are
free ipyparallel looks for one without end."""


class PortTakenError(UserError):
    """Another process took a port that the controller was going to use."""

    def __init__(self) -> None:
        super().__init__(
            f"in {_START_TRIES} attempts, other processes took ports that "
            "ipyparallel's controller had found free; run %dist_start again"
        )


def check_free_ports() -> None:
    """UserError unless this host has enough TCP ports that nobody uses."""
    with contextlib.ExitStack() as files:
        for number in range(_NUM_PORTS):
            try:
                files.enter_context(socket.socket()).bind(("", 0))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # it may be without so many files
                    return
                raise UserError(
                    f"this host has {number} free TCP ports, and a lab may need "
                    f"{_NUM_PORTS}: end programs that hold them (`ss -tanp` lists "
                    "them), or let the system give out more (on Linux, `sysctl "
                    "net.ipv4.ip_local_port_range` shows which). Nothing was started"
                ) from None


def start_cluster(placements: Sequence[Placement], **settings: Any) -> "Cluster":
    """A Cluster; with other ports, where another process has just taken some."""
    check_free_ports()
    for _ in range(_START_TRIES - 1):
        with contextlib.suppress(PortTakenError):
            return Cluster(placements, **settings)
    return Cluster(placements, **settings)


def heartbeat_period(num_ranks: int) -> str:
    """An option of the controller. Engines are registered by a heartbeat, for which
    ipyparallel's 3 s is long; each takes a tenth of a millisecond a rank."""
    return f"--HeartMonitor.period={min(250, max(50, 12 * num_ranks))}"


class LabEngines(Engines):
    """All engines of a lab, and this process's client of the controller between."""

    folder: Path
    """The lab's own, for this user alone; removed at its end."""
    why_ended = "the lab was stopped; %dist_stop, then %dist_start, starts another"
    """What is said of ranks that were ended here."""

    def __init__(self) -> None:
        self._client: Any = None
        self._engines: dict[int, Engine] = {}
        self._engine_ids: dict[int, int] = {}
        self._on_late_output: OnLateOutput = lambda rank, kind, content: None
        self._late_output_at: dict[int, float] = {}
        self._is_ending = threading.Event()

    @property
    def ranks(self) -> Sequence[int]:
        return sorted(self._engines)

    def engine(self, rank: int) -> Engine:
        return self._engines[rank]

    def engine_id(self, rank: int) -> int:
        return self._engine_ids[rank]

    @property
    def client(self) -> Any:
        return self._client

    @property
    def is_ended(self) -> bool:
        """Whether they were ended here, and are not coming back."""
        return self._is_ending.is_set()

    def unreachable_reason(self) -> str:
        return self.why_ended if self.is_ended else self.lost_reason()

    @abc.abstractmethod
    def lost_reason(self) -> str:
        """Why no rank can be reached any more, though nobody has stopped the lab; ""
        while they can."""

    def listen(self, rank: int) -> None:
        def receive(msg: dict[str, Any]) -> None:
            self._late_output_at[rank] = time.monotonic()
            self._on_late_output(rank, msg["header"]["msg_type"], msg["content"])

        content = {"request": "listen", "arguments": {}}
        compat.send_request(
            self._client, self._ident(rank), f"{KEY}_request", content, receive
        )

    def show_late_output(self, show: OnLateOutput) -> None:
        self._on_late_output = show

    def late_output_at(self, rank: int) -> float:
        return self._late_output_at.get(rank, -math.inf)

    def part(self, ranks: range) -> "Part":
        """Some of the engines, which are ranks from 0 in it."""
        return Part(self, ranks, self.new_store())

    @abc.abstractmethod
    def new_store(self) -> "Store":
        """Where a group other than that of all ranks meets."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End every process that was started for it, and wait until they are."""


class Store(Protocol):
    """Where the ranks of a group meet."""

    def open(self) -> Meeting:
        """Serve an empty store, in place of the former one."""

    def close(self) -> None:
        """Serve none."""


class Cluster(LabEngines):
    """One ipyparallel engine per rank, all ours, and the controller between.

    On one host everything listens on the loopback address, on ports that the system
    chose. A watchdog process ends the engines when this process is gone in any way.
    """

    _starter: LocalEngines | RemoteEngines
    _controller: EngineProcess | None = None

    def __init__(
        self,
        placements: Sequence[Placement],
        *,
        hosts: Hosts | None,
        environment: dict[str, str],
        on_progress: Callable[[str], None],
    ) -> None:
        """`hosts` are those that the ranks are on, unless it is this one."""
        self._address = hosts.own_address if hosts else "127.0.0.1"
        compat.GATE.check()
        absolute(".")  # without one ipyparallel would end this process
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="labkit-"))
        self._registered: dict[int, Engine] = {}
        """By engine id; a former rank's, until the controller has forgotten it."""
        try:
            self._write_controller_config()  # nothing runs yet: the disk may be full
            self.host = Host(
                self.folder,
                environment,
                check=interrupts.check,
                on_look=self._look,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._cluster = ipyparallel.Cluster(
            n=len(placements),
            profile_dir=str(self.folder),
            cluster_file="",
            controller_ip=self._address,
            controller_args=[*_CONTROLLER_ARGS, heartbeat_period(len(placements))],
            engine_launcher_class=compat.launcher_of_engines(self.host.fork),
            shutdown_atexit=False,
            log_level=logging.CRITICAL,
        )
        self._store_numbers = itertools.count(1)
        self._store = self.new_store()
        self._starts_engines = threading.Lock()
        own = {**self.host.environment, **safe_path()}
        try:
            if hosts is None:
                # Not that of another lab, where this process is a rank of one.
                other = {HOST_VARIABLE: ""} if HOST_VARIABLE in os.environ else {}
                self._starter = LocalEngines(self.host, own | other)
            else:
                self._starter = RemoteEngines(hosts, placements, environment, self)
            on_progress("starting the controller")
            self._cluster.start_controller_sync(environment=own)
            self._controller = watched(self.host, self._cluster.controller)
            self.start_engines(range(len(placements)), on_progress=on_progress)
        except BaseException as error:
            is_port_taken = self._is_port_taken()
            self.stop()
            if is_port_taken:
                raise PortTakenError from error
            raise

    def _is_port_taken(self) -> bool:
        """Whether another process listens on one of the controller's ports.

        ipyparallel looks for free ports, and listens on them a moment later: another
        process may have one by then. The controller runs on without that part.
        """
        return _TAKEN in self._controller_log()

    def _controller_log(self) -> str:
        launcher = self._cluster.controller
        if launcher is None:
            return ""
        try:
            return Path(launcher.output_file).read_text(errors="replace")
        except OSError:  # it has ended, and ipyparallel has taken what it printed
            return str(launcher.get_output())

    def _write_controller_config(self) -> None:
        """Have the controller encrypt its channels, sign its messages, and do little.

        In a file: every user of the host sees a command line.
        """
        path = self.folder / "ipcontroller_config.py"
        path.touch(0o600)
        key = secrets.token_hex(32).encode()
        # ipyparallel signs nothing where it encrypts, unless there is a key.
        path.write_text(
            f"c.IPController.enable_curve = True\nc.Session.key = {key!r}\n"
            f"from {compat.__name__} import spare_controller\nspare_controller()\n"
        )

    def start_engines(
        self, ranks: Sequence[int], *, on_progress: Callable[[str], None]
    ) -> None:
        # The new ones are known as those that were not there.
        with self._starts_engines:
            self._start_engines(ranks, on_progress)

    def _start_engines(
        self, ranks: Sequence[int], on_progress: Callable[[str], None]
    ) -> None:
        if self._client is None:
            self._client = self._connected()
            compat.keep_listening(self._client)
        elif not (self.folder / "security").is_dir():  # ipyparallel would wait for it
            raise UserError(
                f"the lab's folder {self.folder} was removed, by what tidies up such "
                "folders or by hand, and no rank can be started without it; "
                "%dist_restart --all (lab.restart(everyone=True)) makes another"
            )
        self._starter.prepare(self._cluster, on_progress)
        on_progress(f"starting {len(ranks)} engines")
        known = self.known()
        try:
            with self._starter.starting(self._cluster, ranks) as started:
                on_progress("waiting for the engines")
                engine_of = dict(self.register(started, _LOAD, known))
        except BaseException:
            for engine_id in set(self._client.ids) - known:
                compat.unregister(self._client, engine_id)
            raise
        for rank, each in zip(ranks, started, strict=True):
            self._engines[rank] = each
            self._engine_ids[rank] = engine_of[each.key]
            self._registered[engine_of[each.key]] = each

    def _connected(self) -> Any:
        try:
            return self._cluster.connect_client_sync()
        except (TimeoutError, RuntimeError) as error:
            said = self._controller_log().strip() or "(nothing)"
            words = "\n".join(said.splitlines()[-15:])
            raise UserError(
                f"ipyparallel's controller did not start: {error}; it printed:\n{words}"
            ) from error

    def _look(self) -> None:
        """In a thread, now and then: ask how engines are elsewhere, and have the
        controller forget those that have ended."""
        if self._client is not None:
            self._starter.look()
        for engine_id, each in list(self._registered.items()):
            if not each.is_alive:
                # Its calls that have not ended then fail in the client.
                with contextlib.suppress(OSError):  # the user has closed it
                    compat.unregister(self._client, engine_id)
                del self._registered[engine_id]

    # ---- as Reach ----

    def known(self) -> set[int]:
        return set(self._client.ids)

    def register(
        self, started: Sequence[Any], load: str, known: set[int]
    ) -> list[tuple[tuple[str, int], int]]:
        """Wait until the controller knows all that were started, and "module:name" at
        `load` has given the key of each: the keys, with the numbers of the engines.

        The controller may still list a dead engine among those that were `known`.
        """
        deadline = time.monotonic() + timeouts.START_S
        ask_at = time.monotonic() + timeouts.ASK_S

        def new() -> list[int]:
            return sorted(set(self._client.ids) - known)

        def failed(what: str) -> UserError:
            dead_first = sorted(started, key=lambda each: each.is_alive)
            logs = [(each, each.log().strip()) for each in dead_first]
            said = [
                log for each, log in logs if not each.is_alive or _REGISTERED not in log
            ]
            said.append(self._starter.log())
            words = "\n".join(next(filter(None, said), "(nothing)").splitlines()[-15:])
            return UserError(f"{what}; one that did not printed:\n{words}")

        while len(engines := new()) < len(started):
            interrupts.check()
            if reason := self.unreachable_reason():
                raise UserError(reason)
            if self._is_port_taken():
                raise PortTakenError
            if time.monotonic() > ask_at:
                compat.ask_for_engines(self._client)
                ask_at = time.monotonic() + timeouts.ASK_S
            if time.monotonic() > deadline or not all(e.is_alive for e in started):
                raise failed(f"{len(engines)} of {len(started)} engines started")
            time.sleep(timeouts.QUICK_POLL_S)
        if self._is_port_taken():
            raise PortTakenError
        loading = self._client[engines].apply_async(call_by_name, load, ())
        try:
            self._wait(loading, started, timeouts.START_S)
            return [*zip(loading.get(), engines, strict=True)]
        except (RankDiedError, TimeoutError, ipyparallel.error.IPythonError) as error:
            raise failed(f"an engine did not get ready: {error}") from error

    def ask_engine(
        self, engine_id: int, who: str, question: str, **arguments: Any
    ) -> "Future[Any]":
        return ask_engine(self._client, engine_id, who, question, arguments)

    def begin_on(self, host: RemoteHost, function: str, *args: Any) -> Any:
        try:
            view = self._client[host.engine_id]
        except (IndexError, ipyparallel.error.NoEnginesRegistered) as error:
            raise UserError(f"the agent on host {host.name} has ended") from error
        return view.apply_async(call_by_name, function, args)

    def wait_for(self, call: Any, host: RemoteHost) -> Any:
        try:
            self._wait(call, [host], timeouts.START_S)
            return call.get()
        except RankDiedError as error:
            raise UserError(f"{self.unreachable_reason() or host.death()}") from error
        except (TimeoutError, ipyparallel.error.IPythonError) as error:
            raise UserError(f"host {host.name}: {error}") from error

    # ---- as Engines ----

    def lost_reason(self) -> str:
        assert self._controller is not None
        if self._controller.is_alive:
            return ""
        death = self._controller.death()
        return (
            "ipyparallel's controller, which carries every message, died at "
            f"{death.clock}: {death}; no rank can be reached: %dist_restart --all "
            "(lab.restart(everyone=True)) restarts everything"
        )

    def open_store(self) -> Meeting:
        self._check([])
        return self._store.open()

    def new_store(self) -> "GroupStore":
        return GroupStore(self._place_of_store, self._store_numbers)

    def _place_of_store(self, number: int) -> Meeting:
        name = f"store-{number}"
        if self.is_local:
            return Meeting(str(self.folder / name))
        return Meeting(address=(self._address, 0), name=name)

    def free_port(self, rank: int) -> int:
        return self._starter.free_port(rank)

    def hosts_without(self, folder: Path) -> list[str]:
        return self._starter.hosts_without(folder)

    @property
    def is_local(self) -> bool:
        return isinstance(self._starter, LocalEngines)

    @property
    def ends_at(self) -> float | None:
        return self._starter.ends_at

    def end_engines(self, ranks: Sequence[int]) -> None:
        self._end({rank: self._engines[rank] for rank in ranks})

    def _end(self, engines: Mapping[int, Engine]) -> None:
        """`end_engines`, of engines by their ranks, also former ones."""
        for engine in engines.values():
            end_at_once(engine)
        for rank, engine in engines.items():
            engine.wait(timeouts.END_S)
            if engine.is_alive:
                raise UserError(f"rank {rank} does not end; use %dist_stop")
        self._starter.end_sessions([*engines.values()])

    @contextlib.contextmanager
    def changing(
        self,
        started: Sequence[int],
        placements: Sequence[Placement],
        hosts: Hosts | None,
        *,
        on_progress: Callable[[str], None],
    ) -> Iterator[None]:
        """An engine for each of `started`, to be ranks in these places with those that
        are there; engines that then are no rank end. Where that, or what is done
        within it, fails, all is as before.
        """
        engines, ids = self._engines, self._engine_ids
        go_back = self._starter.move(hosts, placements)
        self._engines, self._engine_ids = dict(engines), dict(ids)
        try:
            if started:
                self.start_engines(started, on_progress=on_progress)
            yield
        except BaseException:
            for rank, engine in self._engines.items():
                if engine is not engines.get(rank):
                    end_at_once(engine)
            self._engines, self._engine_ids = engines, ids
            go_back()
            self._starter.leave_unused()
            raise
        for rank in range(len(placements), len(engines)):
            del self._engines[rank], self._engine_ids[rank]
        now = {id(engine) for engine in self._engines.values()}
        self._end({r: engine for r, engine in engines.items() if id(engine) not in now})
        self._starter.leave_unused()

    # ---- the end ----

    def stop(self) -> None:
        """End every process that this cluster started, and wait until they are."""
        self._is_ending.set()
        self._on_late_output = lambda rank, kind, content: None
        self.host.stop_looking()
        try:
            if self._client is not None:
                if self._controller is not None and self._controller.is_alive:
                    self._starter.end()
                self._client.close(linger=0)
                self._client = None
        finally:
            self.host.end()
            self._store.close()
            compat.end_loop(self._cluster)


class Part(Engines):
    """Some engines of a cluster in a row, the first of which is rank 0 here."""

    def __init__(self, cluster: LabEngines, ranks: range, store: Store) -> None:
        """`ranks` are the cluster's."""
        self.there = ranks
        """Their numbers in the cluster, in order of rank."""
        self._cluster = cluster
        self._store = store

    @property
    def ranks(self) -> Sequence[int]:
        return range(len(self.there))

    def engine(self, rank: int) -> Engine:
        return self._cluster.engine(self.there[rank])

    def engine_id(self, rank: int) -> int:
        return self._cluster.engine_id(self.there[rank])

    @property
    def client(self) -> Any:
        return self._cluster.client

    def unreachable_reason(self) -> str:
        return self._cluster.unreachable_reason()

    def start_engines(
        self, ranks: Sequence[int], *, on_progress: Callable[[str], None]
    ) -> None:
        there = [self.there[rank] for rank in ranks]
        self._cluster.start_engines(there, on_progress=on_progress)

    def end_engines(self, ranks: Sequence[int]) -> None:
        self._cluster.end_engines([self.there[rank] for rank in ranks])

    def listen(self, rank: int) -> None:
        self._cluster.listen(self.there[rank])

    def show_late_output(self, show: OnLateOutput) -> None:
        self._cluster.show_late_output(show)

    def late_output_at(self, rank: int) -> float:
        return self._cluster.late_output_at(self.there[rank])

    def open_store(self) -> Meeting:
        self._check([])
        return self._store.open()

    def free_port(self, rank: int) -> int:
        return self._cluster.free_port(self.there[rank])

    def hosts_without(self, folder: Path) -> list[str]:
        return self._cluster.hosts_without(folder)

    @property
    def is_local(self) -> bool:
        return self._cluster.is_local

    @property
    def ends_at(self) -> float | None:
        return self._cluster.ends_at

    def close(self) -> None:
        """It is used no more; its engines stay."""
        self._store.close()


class GroupStore:
    """Where the ranks of a process group meet: a new place for each formation."""

    def __init__(self, place: Callable[[int], Meeting], numbers: Iterator[int]) -> None:
        """`place` says where the store of a number is; `numbers` are those of all."""
        self._place = place
        self._numbers = numbers
        self._server: KeyServer | None = None
        self._changes = threading.Lock()

    def open(self) -> Meeting:
        """Serve an empty store, in place of the former one."""
        with self._changes:  # a stop in another thread waits for the end of it
            self._close()
            self._server = KeyServer(self._place(next(self._numbers)))
            return self._server.meeting

    def close(self) -> None:
        """Serve none."""
        with self._changes:
            self._close()

    def _close(self) -> None:
        server, self._server = self._server, None  # also where an interrupt cuts it
        if server is not None:
            server.close()


def safe_path() -> dict[str, str]:
    """What keeps an engine, until it has started, from importing what lies in the
    notebook's folder; nothing where the user has set that for good."""
    return {} if os.environ.get("PYTHONSAFEPATH") else SAFE_PATH
