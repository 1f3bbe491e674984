"""The engines of a lab: start them, reach them by rank, end them."""

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from concurrent.futures import Future
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
from labkit.messages import is_message
from labkit.notebook.cluster import watchdog
from labkit.notebook.cluster.exit_cause import Death
from labkit.notebook.cluster.exit_cause import EngineProcess
from labkit.notebook.cluster.forked_engines import ForkServer
from labkit.notebook.cluster.forked_engines import ForkServerGoneError
from labkit.notebook.cluster.silence import SilenceWatch
from labkit.notebook.kernel import interrupts
from labkit.rank_spec import format_ranks
from labkit.records import DUMP_SIGNAL
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


class Cluster:
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
        self._store: KeyServer | None = None
        self._num_stores = 0
        self._changes_store = threading.Lock()
        self._client: Any = None
        self._controller: EngineProcess | None = None
        self._engines: dict[int, EngineProcess] = {}
        self._engine_ids: dict[int, int] = {}
        self._registered: dict[int, EngineProcess] = {}
        """By engine id; a former rank's, until the controller has forgotten it."""
        self.on_late_output: OnLateOutput = lambda rank, kind, content: None
        """Called, in the client's thread, with what ranks print between two cells."""
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
        """Start an engine for each of `ranks`, and wait until it can be a rank."""
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

    # ---- reaching ranks ----

    def is_alive(self, rank: int) -> bool:
        """Whether the rank's process runs and the controller knows it."""
        return self._client is not None and (
            self._engine_ids[rank] in self._client.ids and self._engines[rank].is_alive
        )

    def unreachable_reason(self) -> str:
        """Why no rank can be reached any more; "" while they can."""
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

    def death(self, rank: int) -> Death:
        """How a rank that is not alive has ended."""
        return self._engines[rank].death()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: each.pid for rank, each in self._engines.items()}

    def execute(
        self, rank: int, code: str, metadata: dict[str, Any], on_message: OnMessage
    ) -> "Future[Any]":
        """Run `code` in the rank's shell; a future that is done when it has replied.

        `on_message(kind, content)` is called, in the client's thread, with what the
        rank sends meanwhile, in order: IPython's iopub messages ("stream",
        "display_data", "error", ...) and labkit's own ("batch", "outcome").
        RankDiedError where the controller does not know the rank any more.
        """
        client = self._client

        def receive(msg: dict[str, Any]) -> None:
            kind = msg["header"]["msg_type"]
            kept = client.metadata[msg["parent_header"]["msg_id"]]
            if kind == "data_message":
                data = dict(kept["data"])
                kept["data"].clear()
                if is_message(data.get(KEY), rank):
                    on_message(*data[KEY])
                return
            if kind == "stream":
                # The client joins all of it again at every message: not needed.
                kept[msg["content"]["name"]] = ""
            kept["outputs"].clear()
            on_message(kind, msg["content"])

        return compat.send_cell(
            client, self._ident(rank), code, {KEY: metadata}, receive
        )

    def listen(self, rank: int) -> None:
        """Hear what is printed on the rank while no cell runs: see `on_late_output`."""

        def receive(msg: dict[str, Any]) -> None:
            self.on_late_output(rank, msg["header"]["msg_type"], msg["content"])

        content = {"request": "listen", "arguments": {}}
        compat.send_request(
            self._client, self._ident(rank), f"{KEY}_request", content, receive
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
                engines = [self._engines[rank] for rank in ranks]
                self._wait(reply, engines, timeout_s, is_collective)
            return reply.get()
        except (TimeoutError, ipyparallel.error.IPythonError) as error:
            self._check([self._engines[rank] for rank in ranks])
            where = "the ranks"
            if isinstance(error, ipyparallel.error.CompositeError):
                # What the first that failed said, without ipyparallel's frame of it.
                ename, evalue, _, engine = error.elist[0]
                if ename == "ValueError":  # of what the user gave: the rank is well
                    raise ValueError(evalue) from None
                if ename == "EngineError":  # the controller knows before the system
                    known = self._client.ids
                    gone = [r for r in ranks if self._engine_ids[r] not in known]
                    who = format_ranks(gone or ranks)
                    raise RankDiedError(f"{who} died a moment ago") from None
                where = format_ranks(
                    r for r in ranks if self._engine_ids[r] == engine["engine_id"]
                )
                error = RuntimeError(f"{ename}: {evalue}")
            raise CallError(f"{name} failed on {where}: {error}") from error

    def begin(self, function: str, *args: Any, ranks: Sequence[int]) -> Any:
        """Like `call`, but does not wait: ipyparallel's AsyncResult."""
        self._check([self._engines[rank] for rank in ranks])
        engines = [self._engine_ids[rank] for rank in ranks]
        try:
            view = self._client[engines]
        except (IndexError, ipyparallel.error.NoEnginesRegistered):
            raise RankDiedError(f"{format_ranks(ranks)} died a moment ago") from None
        return view.apply_async(call_by_name, function, args)

    def _wait(
        self,
        reply: Any,
        engines: Iterable[EngineProcess],
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
            self._check([self._engines[rank] for rank in ranks])
            if is_collective:
                raise_failures(reply)
            for rank in watch.silent():
                raise SilentRankError(rank, self.stall_reason(rank))

    def _check(self, engines: Iterable[EngineProcess]) -> None:
        """RankDiedError unless these live and can be reached."""
        if reason := self.unreachable_reason():
            raise RankDiedError(reason)
        for engine in engines:
            if not engine.is_alive:
                ranks = [rank for rank, e in self._engines.items() if e is engine]
                who = f"rank {ranks[0]}" if ranks else "an engine"
                raise RankDiedError(f"{who} died: {engine.death()}")

    def ask(self, rank: int, request: str, **arguments: Any) -> "Future[Any]":
        """Send a request that the rank answers also while it runs a cell.

        It is one of those that `labkit.rank.engine.requests.ControlRequests` answers.
        The future's result is the answer, or a CallError; it is cancelled where the
        rank is dead.
        """
        answer: Future[Any] = Future()
        try:
            if self.unreachable_reason() or not self.is_alive(rank):
                raise RankDiedError
            ident = self._ident(rank)
        except RankDiedError:
            answer.cancel()
            return answer

        def take(future: Any) -> None:
            reply = future.result()["content"]
            if reply["status"] == "ok":
                answer.set_result(reply["answer"])
            else:
                why = f"rank {rank} cannot answer {request!r}: {reply['why']}"
                answer.set_exception(CallError(why))

        content = {"request": request, "arguments": arguments}
        compat.send_request(
            self._client, ident, f"{KEY}_request", content
        ).add_done_callback(take)
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
        self._engines[rank].send(signal.SIGINT)

    def kill(self, rank: int, why: str = "ended by labkit") -> None:
        """End the rank's process at once; `why` is then the cause of its death."""
        engine = self._engines[rank]
        if engine.is_alive:
            engine.expected_cause = why
            engine.send(signal.SIGKILL)

    def stack_file(self, rank: int) -> str:
        """Where the rank writes its Python stack at `DUMP_SIGNAL`."""
        return str(self.folder / f"stack-{rank}.txt")

    def open_store(self) -> Path:
        """Serve an empty store, in place of the former one; where ranks find it."""
        with self._changes_store:  # a stop in another thread waits for the end of it
            self._check([])
            self._close_store()
            self._num_stores += 1
            self._store = KeyServer(self.folder / f"store-{self._num_stores}")
            return self._store.path

    def _close_store(self) -> None:
        store, self._store = self._store, None  # also where an interrupt cuts it short
        if store is not None:
            store.close()

    def ask_for_dump(self, rank: int) -> None:
        """Have the rank write its stack; native code that holds the GIL or not."""
        Path(self.stack_file(rank)).write_text("")
        self._engines[rank].send(signal.Signals[DUMP_SIGNAL])

    def stall_reason(self, rank: int) -> str:
        """Why a rank whose process is there does not answer, in words."""
        try:
            process = psutil.Process(self.pids[rank])
            if process.status() == psutil.STATUS_STOPPED:
                return (
                    f"its process {process.pid} is stopped, as by SIGSTOP; kill -CONT "
                    f"{process.pid} continues it"
                )
            load = process.cpu_percent(0.05)
        except psutil.NoSuchProcess:
            return "its process has just ended"
        return f"native code holds the GIL; its process uses {load:.0f}% of a core"

    def end_engines(self, ranks: Sequence[int]) -> None:
        """Kill the engines of `ranks` and what they started; wait for their end."""
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

    def was_aborted(self, reply: Any) -> bool:
        """Whether the kernel discarded a request: it does so right after an error."""
        return isinstance(reply, ipyparallel.error.TaskAborted)

    def _ident(self, rank: int) -> bytes:
        try:
            return compat.ident_of(self._client, self._engine_ids[rank])
        except (IndexError, ipyparallel.error.NoEnginesRegistered):
            raise RankDiedError(f"rank {rank} died a moment ago") from None

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
        with self._changes_store:
            self._close_store()
        compat.end_loop(self._cluster)


def raise_failures(reply: Any) -> None:
    """Raise what has failed so far of a collective: the others would wait for it.

    Not that a rank has died: how it did is known in a moment.
    """
    errors = [each.exception() for each in reply.split() if each.done()]
    ipyparallel.error.collect_exceptions(
        [each for each in errors if getattr(each, "ename", "") != "EngineError"]
    )


def safe_path() -> dict[str, str]:
    """What keeps an engine, until it has started, from importing what lies in the
    notebook's folder; nothing where the user has set that for good."""
    return {} if os.environ.get("PYTHONSAFEPATH") else SAFE_PATH
