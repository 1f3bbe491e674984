"""The engines of a lab, or of a part of it: started, reached by rank, and ended."""

import contextlib
import itertools
import logging
import os
import secrets
import tempfile
import threading
import time
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
from labkit.host.exit_cause import EngineProcess
from labkit.host.processes import Host
from labkit.key_server import KeyServer
from labkit.notebook.cluster.reach import Engines
from labkit.notebook.cluster.reach import OnLateOutput
from labkit.notebook.cluster.reach import RankDiedError
from labkit.notebook.kernel import interrupts
from labkit.records import KEY
from labkit.records import SAFE_PATH

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
        self._client: Any = None
        self._registered: dict[int, EngineProcess] = {}
        """By engine id; a former rank's, until the controller has forgotten it."""
        self.host = Host(
            self.folder,
            environment,
            check=interrupts.check,
            on_look=self._forget_the_dead,
        )
        self._cluster = ipyparallel.Cluster(
            n=num_ranks,
            profile_dir=str(self.folder),
            cluster_file="",
            controller_ip="127.0.0.1",
            controller_args=[*_CONTROLLER_ARGS, heartbeat_period(num_ranks)],
            engine_launcher_class=compat.launcher_of_engines(self.host.fork),
            shutdown_atexit=False,
            log_level=logging.CRITICAL,
        )
        self._store_numbers = itertools.count(1)
        self._store = self._new_store()
        self._starts_engines = threading.Lock()
        self._controller: EngineProcess | None = None
        self._engines: dict[int, EngineProcess] = {}
        self._engine_ids: dict[int, int] = {}
        self._on_late_output: OnLateOutput = lambda rank, kind, content: None
        self._is_ending = threading.Event()
        try:
            on_progress("starting the controller")
            self._cluster.start_controller_sync(
                environment={**self.host.environment, **safe_path()}
            )
            self._controller = self._watch(self._cluster.controller)
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

    def _watch(self, launcher: Any) -> EngineProcess:
        """What one of ipyparallel's launchers has started."""
        process = EngineProcess(
            launcher.process, compat.waiter_of(launcher), launcher.output_file
        )
        self.host.watch(process)
        return process

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
        on_progress("loading torch")
        self.host.prepare_to_fork()
        on_progress(f"starting {len(ranks)} engines")
        sets = set(self._cluster.engines)
        known = set() if self._client is None else set(self._client.ids)
        try:
            engine_set = self._cluster.start_engines_sync(
                len(ranks),
                environment={**self.host.environment, **safe_path()},
                delay=0,
            )
            launchers = self._cluster.engines[engine_set].launchers
            started = [self._watch(launchers[str(i)]) for i in range(len(ranks))]
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
            said.append(self.host.fork_log())
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

    def _forget_the_dead(self) -> None:
        """Have the controller forget engines that have ended."""
        for engine_id, each in list(self._registered.items()):
            if not each.is_alive:
                # Its calls that have not ended then fail in the client.
                with contextlib.suppress(OSError):  # the user has closed it
                    compat.unregister(self._client, engine_id)
                del self._registered[engine_id]

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
            self._engines[rank].wait(timeouts.END_S)
            if self._engines[rank].is_alive:
                raise UserError(f"rank {rank} does not end; use %dist_stop")
        self.host.end_sessions({self._engines[rank].pid for rank in ranks})

    # ---- the end ----

    def stop(self) -> None:
        """End every process that this cluster started, and wait until they are."""
        self._is_ending.set()
        self.host.stop_looking()
        if self._client is not None:
            self._client.close(linger=0)
            self._client = None
        self.host.end()
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
