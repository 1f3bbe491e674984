"""The engines of a lab: start them, reach them by rank, end them."""

import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ipyparallel
import psutil

from labkit.notebook import watchdog
from labkit.records import DUMP_SIGNAL
from labkit.records import KEY
from labkit.records import is_message

# Registration waits for heartbeats; ipyparallel's own period of 3 s makes it slow.
# A rank that holds the GIL for long must not count as dead: its nanny tells that.
_CONTROLLER_ARGS = [
    "--HeartMonitor.period=250",
    "--HeartMonitor.max_heartmonitor_misses=2400",
    "--IPController.use_threads=True",
    "--log-level=ERROR",  # it warns at every message that publish_data sends
]
_LOAD = "labkit.rank.cell:load"
_START_TIMEOUT_S = 120

OnMessage = Callable[[str, dict[str, Any]], None]


def _last_words(launchers: Sequence[Any]) -> str:
    """The end of the first log that says anything."""
    for launcher in launchers:
        log = Path(launcher.output_file)
        if log.exists() and (text := log.read_text().strip()):
            return "\n".join(text.splitlines()[-15:])
    return "(nothing)"


class CallError(RuntimeError):
    """A call of labkit's own failed on a rank."""


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
        self._folder = tempfile.mkdtemp(prefix="labkit-")
        self._token = uuid.uuid4().hex
        self._environment = {**environment, watchdog.TOKEN_VARIABLE: self._token}
        self._watchdog = self._start_watchdog()
        self._cluster = ipyparallel.Cluster(
            n=num_ranks,
            profile_dir=self._folder,
            cluster_file="",
            controller_ip="127.0.0.1",
            controller_args=_CONTROLLER_ARGS,
            shutdown_atexit=False,
            log_level=logging.CRITICAL,
        )
        self._client: Any = None
        self._launchers: dict[int, Any] = {}
        self._engine_ids: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        """Process ids by rank."""
        try:
            on_progress("starting the controller")
            self._cluster.start_controller_sync(environment=self._environment)
            self.start_engines(range(num_ranks), on_progress=on_progress)
        except BaseException:
            self.stop()
            raise

    def _start_watchdog(self) -> "subprocess.Popen[bytes]":
        environment = dict(os.environ)
        # In a lab that runs inside another's rank: the other's end is to end our
        # kernel, and our watchdog is to outlive it for a moment.
        environment.pop(watchdog.TOKEN_VARIABLE, None)
        return subprocess.Popen(
            [sys.executable, watchdog.__file__, self._token, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def start_engines(
        self, ranks: Sequence[int], *, on_progress: Callable[[str], None]
    ) -> None:
        """Start an engine for each of `ranks`, and wait until it can be a rank."""
        on_progress(f"starting {len(ranks)} engines")
        engine_set = self._cluster.start_engines_sync(
            len(ranks),
            environment=dict(self._environment),
            delay=0,
        )
        launchers = self._cluster.engines[engine_set].launchers
        started = {rank: launchers[str(i)] for i, rank in enumerate(ranks)}
        self._launchers.update(started)
        if self._client is None:
            self._client = self._cluster.connect_client_sync()
        on_progress("waiting for the engines")
        known = set(self._engine_ids.values())
        self._wait_for_engines(known, list(started.values()))
        on_progress("loading torch on the engines")
        new = sorted(set(self._client.ids) - known)
        engine_of = dict(
            zip(self._client[new].apply_sync(call_by_name, _LOAD, ()), new, strict=True)
        )
        for rank, launcher in started.items():
            self.pids[rank] = launcher.pid
            self._engine_ids[rank] = engine_of[launcher.pid]

    def _wait_for_engines(self, known: set[int], launchers: list[Any]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(set(self._client.ids) - known) < len(launchers):
            ended = [each for each in launchers if not each.process.is_running()]
            if ended or time.monotonic() > deadline:
                registered = len(set(self._client.ids) - known)
                raise RuntimeError(
                    f"{registered} of {len(launchers)} engines started; one that did "
                    f"not printed:\n{_last_words([*ended, *launchers])}"
                )
            time.sleep(0.02)

    # ---- reaching ranks ----

    def is_alive(self, rank: int) -> bool:
        """Whether the rank's process runs and the controller knows it."""
        return self._client is not None and (
            self._engine_ids[rank] in self._client.ids
            and self._launchers[rank].process.is_running()
        )

    def execute(
        self, rank: int, code: str, metadata: dict[str, Any], on_message: OnMessage
    ) -> "Future[Any]":
        """Run `code` in the rank's shell; a future that is done when it has replied.

        `on_message(kind, content)` is called, in the client's thread, with what the
        rank sends meanwhile, in order: IPython's iopub messages ("stream",
        "display_data", "error", ...) and labkit's own ("batch", "outcome").
        """
        client = self._client

        def listen(future: Any) -> None:
            future.iopub_callbacks.append(receive)

        def receive(msg: dict[str, Any]) -> None:
            kind = msg["header"]["msg_type"]
            kept = client.metadata[msg["parent_header"]["msg_id"]]
            if kind == "data_message":
                data = dict(kept["data"])
                kept["data"].clear()
                if is_message(data.get(KEY)):
                    on_message(*data[KEY])
                return
            if kind == "stream":
                # The client joins all of it again at every message: not needed.
                kept[msg["content"]["name"]] = ""
            kept["outputs"].clear()
            on_message(kind, msg["content"])

        return client.send_execute_request(
            client._mux_stream,
            code,
            silent=False,
            ident=self._ident(rank),
            metadata={KEY: metadata},
            message_future_hook=listen,
        )

    def call(
        self,
        function: str,
        *args: Any,
        ranks: Sequence[int],
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """What "module:name"(*args) returns on each of `ranks`.

        By name, so that this process need not import what runs on ranks. Raises the
        ValueError that a rank raised, and CallError for all else.
        """
        name = function.split(":")[1]
        try:
            return self.begin(function, *args, ranks=ranks).get(timeout=timeout_s)
        except TimeoutError as error:
            raise CallError(f"{name}: no answer in {timeout_s:g} s") from error
        except ipyparallel.error.CompositeError as error:
            # What the first rank that failed said, without ipyparallel's frame of it.
            ename, evalue, _, _ = error.elist[0]
            if ename == "ValueError":  # of what the user gave: the rank is well
                raise ValueError(evalue) from None
            raise CallError(f"{name} failed on the ranks: {ename}: {evalue}") from error
        except ipyparallel.error.IPythonError as error:
            raise CallError(f"{name} failed on the ranks: {error}") from error

    def begin(self, function: str, *args: Any, ranks: Sequence[int]) -> Any:
        """Like `call`, but does not wait: ipyparallel's AsyncResult."""
        engines = [self._engine_ids[rank] for rank in ranks]
        return self._client[engines].apply_async(call_by_name, function, args)

    def ask(self, rank: int, request: str, **arguments: Any) -> "Future[Any]":
        """Send a request that the rank answers also while it runs a cell.

        It is one of those that `labkit.rank.cell.CellRunner` answers. The future's
        result is the answer, or a CallError; it is cancelled where the rank is dead.
        """
        answer: Future[Any] = Future()
        try:
            ident = self._ident(rank) if self.is_alive(rank) else None
        except (IndexError, ipyparallel.error.NoEnginesRegistered):
            ident = None  # it died a moment ago
        if ident is None:
            answer.cancel()
            return answer

        def take(future: Any) -> None:
            reply = future.result()["content"]
            if reply["status"] == "ok":
                answer.set_result(reply["answer"])
            else:
                why = f"rank {rank} cannot answer {request!r}: {reply['why']}"
                answer.set_exception(CallError(why))

        self._client._send(
            self._client._control_stream,
            f"{KEY}_request",
            content={"request": request, "arguments": arguments},
            ident=ident,
        ).add_done_callback(take)
        return answer

    def interrupt(self, rank: int, release_after_s: float) -> "Future[Any]":
        """Ask the rank to stop its cell; the future is done when it has heard that."""
        return self.ask(rank, "interrupt", release_after_s=release_after_s)

    def kill(self, rank: int) -> None:
        """End the rank's process at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._launchers[rank].process.kill()

    def stack_file(self, rank: int) -> str:
        """Where the rank writes its Python stack at `DUMP_SIGNAL`."""
        return str(Path(self._folder) / f"stack-{rank}.txt")

    def ask_for_dump(self, rank: int) -> None:
        """Have the rank write its stack; native code that holds the GIL or not."""
        Path(self.stack_file(rank)).write_text("")
        with contextlib.suppress(psutil.NoSuchProcess):
            process = self._launchers[rank].process
            process.send_signal(signal.Signals[DUMP_SIGNAL])

    def what_keeps(self, rank: int) -> str:
        """Why a rank whose process is there does not answer, in words."""
        try:
            process = psutil.Process(self.pids[rank])
            if process.status() == psutil.STATUS_STOPPED:
                return f"its process {process.pid} is stopped, as SIGSTOP does"
            load = process.cpu_percent(0.05)
        except psutil.NoSuchProcess:
            return "its process has just ended"
        return f"native code holds the GIL; its process uses {load:.0f}% of a core"

    def end_engines(self, ranks: Sequence[int]) -> None:
        """Kill the engines of `ranks`, and wait until the controller knows."""
        for rank in ranks:
            self.kill(rank)
        deadline = time.monotonic() + _START_TIMEOUT_S
        known = {self._engine_ids[rank] for rank in ranks}
        while known & set(self._client.ids):
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {list(ranks)} do not end; use %dist_stop")
            time.sleep(0.02)

    def was_dropped(self, reply: Any) -> bool:
        """Whether the kernel discarded a request: it does so right after an error."""
        return isinstance(reply, ipyparallel.error.TaskAborted)

    def cause_of_death(self, rank: int) -> str:
        """Why a rank's process ended, in words."""
        launcher = self._launchers[rank]
        # The code is told once: ipyparallel's thread takes it, and keeps it there.
        launcher._wait_thread.join(2)
        try:
            code = launcher.process.wait(timeout=2)
        except Exception as error:  # psutil's, of which we expect none
            code = error
        if isinstance(code, int) and code < 0:
            name = signal.Signals(-code).name
            cause = _LIKELY_CAUSES.get(name)
            return f"killed by {name}" + (f" ({cause})" if cause else "")
        return f"ended with exit code {code}"

    def _ident(self, rank: int) -> bytes:
        return self._client._build_targets(self._engine_ids[rank])[0][0]

    # ---- the end ----

    def stop(self) -> None:
        """End every process that this cluster started, and wait until they are."""
        if self._client is not None:
            self._client.close(linger=0)
            self._client = None
        if self._watchdog.stdin is not None and not self._watchdog.stdin.closed:
            self._watchdog.stdin.close()
        self._watchdog.wait()


_LIKELY_CAUSES = {
    "SIGKILL": "by hand, or by the system when memory ran out",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up",
    "SIGTERM": "asked to end from outside",
}


def call_by_name(function: str, args: tuple[Any, ...]) -> Any:
    """On an engine: call the function at "module:name"."""
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)(*args)
