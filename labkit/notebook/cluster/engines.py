"""The engines of a lab, or of a part of it: started, reached by rank, and ended."""

import contextlib
import itertools
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipyparallel
import psutil

from labkit import timeouts
from labkit.call_by_name import call_by_name
from labkit.checks import UserError
from labkit.checks import absolute
from labkit.compat import ipyparallel as compat
from labkit.key_server import KeyServer
from labkit.notebook.cluster import watchdog
from labkit.notebook.cluster.exit_cause import EngineProcess
from labkit.notebook.cluster.forked_engines import ForkServer
from labkit.notebook.cluster.forked_engines import ForkServerGoneError
from labkit.notebook.cluster.reach import Engines
from labkit.notebook.cluster.reach import OnLateOutput
from labkit.notebook.cluster.reach import RankDiedError
from labkit.notebook.kernel import interrupts
from labkit.records import KEY
from labkit.records import SAFE_PATH

_CONTROLLER_ARGS = [
    # A rank that holds the GIL for long must not count as dead: `_supervise` reports
    # the dead.
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


class PortTakenError(UserError):
    """Another process took a port that the controller was going to use."""

    def __init__(self) -> None:
        super().__init__(
            f"in {_START_TRIES} attempts, other processes took ports that "
            "ipyparallel's controller had found free; run %dist_start again"
        )


def start_cluster(num_ranks: int, **settings: Any) -> "Cluster":
    """A Cluster; with other ports, where another process has just taken some."""
    for _ in range(_START_TRIES - 1):
        with contextlib.suppress(PortTakenError):
            return Cluster(num_ranks, **settings)
    return Cluster(num_ranks, **settings)


def heartbeat_period(num_ranks: int) -> str:
    """An option of the controller. Engines are registered by a heartbeat, for which
    ipyparallel's 3 s is long; each takes a tenth of a millisecond a rank."""
    return f"--HeartMonitor.period={min(250, max(100, 12 * num_ranks))}"


class Cluster(Engines):
    """One ipyparallel engine per rank, on this host, all ours.

    Everything listens on the loopback address, on ports that the system chose. A
    watchdog process ends the engines when this process is gone in any way.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        environment: dict[str, str],
        on_progress: Callable[[str], None],
    ) -> None:
        compat.GATE.check()
        absolute(".")  # without one ipyparallel would end this process
        self.folder = Path(tempfile.mkdtemp(prefix="labkit-"))
        """The lab's own, for this user alone; removed at its end."""
        self._write_controller_config()  # while nothing runs yet: the disk may be full
        self._token = uuid.uuid4().hex
        self._environment = {**environment, watchdog.TOKEN_VARIABLE: self._token}
        self._watchdog = self._start_watchdog()
        self._fork_server = self._start_fork_server()
        self._cluster = ipyparallel.Cluster(
            n=num_ranks,
            profile_dir=str(self.folder),
            cluster_file="",
            controller_ip="127.0.0.1",
            controller_args=[*_CONTROLLER_ARGS, heartbeat_period(num_ranks)],
            engine_launcher_class=compat.launcher_of_engines(self._fork),
            shutdown_atexit=False,
            log_level=logging.CRITICAL,
        )
        self._store_numbers = itertools.count(1)
        self._store = self._new_store()
        self._starts_engines = threading.Lock()
        self._client: Any = None
        self._controller: EngineProcess | None = None
        self._engines: dict[int, EngineProcess] = {}
        self._engine_ids: dict[int, int] = {}
        self._registered: dict[int, EngineProcess] = {}
        """By engine id; a former rank's, until the controller has forgotten it."""
        self._on_late_output: OnLateOutput = lambda rank, kind, content: None
        self._is_ending = threading.Event()
        self._supervisor = threading.Thread(
            target=self._supervise, name="labkit-supervisor", daemon=True
        )
        self._supervisor.start()
        try:
            on_progress("starting the controller")
            self._cluster.start_controller_sync(
                environment={**self._environment, **safe_path()}
            )
            self._controller = EngineProcess(self._cluster.controller)
            self.start_engines(range(num_ranks), on_progress=on_progress)
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
        launcher = self._cluster.controller
        if launcher is None:
            return False
        try:
            said = Path(launcher.output_file).read_text(errors="replace")
        except OSError:  # it has ended, and ipyparallel has taken what it printed
            said = launcher.get_output()
        return _TAKEN in said

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

    def _start_watchdog(self) -> "subprocess.Popen[bytes]":
        environment = dict(os.environ)
        # In a lab that runs inside another's rank: the other's end is to end our
        # kernel, and our watchdog is to outlive it for a moment.
        environment.pop(watchdog.TOKEN_VARIABLE, None)
        # No argument, which every user of the host could read.
        environment[watchdog.WATCHED_VARIABLE] = self._token
        return subprocess.Popen(
            [sys.executable, "-P", watchdog.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def _start_fork_server(self) -> ForkServer:
        return ForkServer(self._environment, self.folder / "fork-server.log")

    def _fork(
        self, arguments: list[str], environment: dict[str, str], output_file: str
    ) -> psutil.Process:
        server = self._fork_server
        try:
            return server.fork(arguments, environment, output_file, interrupts.check)
        except ForkServerGoneError:  # a moment ago: it was there when this began
            server = self._fork_server = self._start_fork_server()
        server.wait_until_ready(interrupts.check)
        return server.fork(arguments, environment, output_file, interrupts.check)

    def start_engines(
        self, ranks: Sequence[int], *, on_progress: Callable[[str], None]
    ) -> None:
        with (
            self._starts_engines
        ):  # the new ones are known as those that were not there
            self._start_engines(ranks, on_progress)

    def _start_engines(
        self, ranks: Sequence[int], on_progress: Callable[[str], None]
    ) -> None:
        if not self._fork_server.is_alive:
            self._fork_server = self._start_fork_server()
        on_progress("loading torch")
        self._fork_server.wait_until_ready(interrupts.check)
        on_progress(f"starting {len(ranks)} engines")
        sets = set(self._cluster.engines)
        known = set() if self._client is None else set(self._client.ids)
        try:
            engine_set = self._cluster.start_engines_sync(
                len(ranks), environment={**self._environment, **safe_path()}, delay=0
            )
            launchers = self._cluster.engines[engine_set].launchers
            started = [EngineProcess(launchers[str(i)]) for i in range(len(ranks))]
            if self._client is None:
                self._client = self._cluster.connect_client_sync()
                compat.keep_listening(self._client)
            on_progress("waiting for the engines")
            engine_of = self._wait_for_registration(started, known, on_progress)
        except BaseException:
            for engine_set in set(self._cluster.engines) - sets:
                launchers = self._cluster.engines[engine_set].launchers
                for launcher in list(launchers.values()):
                    if launcher.process is not None:  # it was forked
                        with contextlib.suppress(psutil.NoSuchProcess):
                            launcher.process.kill()
            if self._client is not None:
                for engine_id in set(self._client.ids) - known:
                    compat.unregister(self._client, engine_id)
            raise
        for rank, each in zip(ranks, started, strict=True):
            self._engines[rank] = each
            self._engine_ids[rank] = engine_of[each.pid]
            self._registered[engine_of[each.pid]] = each

    def _wait_for_registration(
        self,
        started: list[EngineProcess],
        known: set[int],
        on_progress: Callable[[str], None],
    ) -> dict[int, int]:
        """Wait until engines can be ranks; process id -> engine id.

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
            said.append(self._fork_server.log())
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
        loading = self._client[engines].apply_async(call_by_name, _LOAD, ())
        try:
            self._wait(loading, started, timeouts.START_S)
            return dict(zip(loading.get(), engines, strict=True))
        except (RankDiedError, TimeoutError, ipyparallel.error.IPythonError) as error:
            raise failed(f"an engine did not load torch: {error}") from error

    def _supervise(self) -> None:
        """In a thread: look at every process now and then; keep the watchdog."""
        while not self._is_ending.wait(timeouts.LOOK_S):
            for each in [self._controller, *self._engines.values()]:
                if each is not None:
                    each.look()
            for engine_id, each in list(self._registered.items()):
                if not each.is_alive:
                    # Its calls that have not ended then fail in the client.
                    with contextlib.suppress(OSError):  # the user has closed it
                        compat.unregister(self._client, engine_id)
                    del self._registered[engine_id]
            if self._watchdog.poll() is not None:
                with contextlib.suppress(OSError):  # then at the next look
                    former, self._watchdog = self._watchdog, self._start_watchdog()
                    former.stdin.close()  # type: ignore[union-attr]

    # ---- as Engines ----

    @property
    def ranks(self) -> Sequence[int]:
        return sorted(self._engines)

    def engine(self, rank: int) -> EngineProcess:
        return self._engines[rank]

    def engine_id(self, rank: int) -> int:
        return self._engine_ids[rank]

    @property
    def client(self) -> Any:
        return self._client

    def unreachable_reason(self) -> str:
        if self._is_ending.is_set():
            return "the lab was stopped; %dist_stop, then %dist_start, starts another"
        assert self._controller is not None
        if self._controller.is_alive:
            return ""
        death = self._controller.death()
        return (
            "ipyparallel's controller, which carries every message, died at "
            f"{death.clock}: {death}; no rank can be reached: %dist_restart --all "
            "(lab.restart(everyone=True)) restarts everything"
        )

    def listen(self, rank: int) -> None:
        def receive(msg: dict[str, Any]) -> None:
            self._on_late_output(rank, msg["header"]["msg_type"], msg["content"])

        content = {"request": "listen", "arguments": {}}
        compat.send_request(
            self._client, self._ident(rank), f"{KEY}_request", content, receive
        )

    def show_late_output(self, show: OnLateOutput) -> None:
        self._on_late_output = show

    def stack_file(self, rank: int) -> str:
        return str(self.folder / f"stack-{rank}.txt")

    def open_store(self) -> Path:
        self._check([])
        return self._store.open()

    def part(self, ranks: range) -> "Part":
        """Some of the engines, which are ranks from 0 in it."""
        return Part(self, ranks, self._new_store())

    def _new_store(self) -> "GroupStore":
        return GroupStore(self.folder, self._store_numbers)

    def end_engines(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.kill(rank)
        for rank in ranks:
            compat.waiter_of(self._engines[rank].launcher).join(timeouts.END_S)
            if self._engines[rank].is_alive:
                raise UserError(f"rank {rank} does not end; use %dist_stop")
        # Each engine leads a session, which its DataLoader's workers belong to.
        sessions = {self._engines[rank].pid for rank in ranks}
        for process in watchdog.find_processes(self._token):
            with contextlib.suppress(OSError, psutil.Error):
                is_theirs = os.getsid(process.pid) in sessions
                if is_theirs and not watchdog.is_tidying(process):
                    process.kill()

    # ---- the end ----

    def stop(self) -> None:
        """End every process that this cluster started, and wait until they are."""
        self._is_ending.set()
        self._supervisor.join()
        if self._client is not None:
            self._client.close(linger=0)
            self._client = None
        if self._watchdog.stdin is not None and not self._watchdog.stdin.closed:
            # A child that this process forked, as a DataLoader's worker, has the pipe
            # too: that it is closed here would not tell the watchdog.
            with contextlib.suppress(OSError):  # it is gone
                self._watchdog.stdin.write(b"\n")
                self._watchdog.stdin.close()
        if self._watchdog.wait() != 0:  # somebody ended it
            watchdog.clean_up(self._token, str(self.folder))
        self._fork_server.join()
        self._store.close()
        compat.end_loop(self._cluster)


class Part(Engines):
    """Some engines of a cluster in a row, the first of which is rank 0 here."""

    def __init__(self, cluster: Cluster, ranks: range, store: "GroupStore") -> None:
        """`ranks` are the cluster's."""
        self.there = ranks
        """Their numbers in the cluster, in order of rank."""
        self._cluster = cluster
        self._store = store

    @property
    def ranks(self) -> Sequence[int]:
        return range(len(self.there))

    def engine(self, rank: int) -> EngineProcess:
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

    def stack_file(self, rank: int) -> str:
        return self._cluster.stack_file(self.there[rank])

    def open_store(self) -> Path:
        self._check([])
        return self._store.open()

    def close(self) -> None:
        """It is used no more; its engines stay."""
        self._store.close()


class GroupStore:
    """Where the ranks of a process group meet: a new place for each formation."""

    def __init__(self, folder: Path, numbers: Iterator[int]) -> None:
        """`numbers` are those of all stores in the folder."""
        self._folder = folder
        self._numbers = numbers
        self._server: KeyServer | None = None
        self._changes = threading.Lock()

    def open(self) -> Path:
        """Serve an empty store, in place of the former one."""
        with self._changes:  # a stop in another thread waits for the end of it
            self._close()
            self._server = KeyServer(self._folder / f"store-{next(self._numbers)}")
            return self._server.path

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
