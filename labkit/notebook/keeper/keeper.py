"""The process that has all of a kept lab: `python -m labkit.notebook.keeper.keeper`.

It is to a kernel what a `Cluster` in the kernel is to other labs. The kernel that
starts it is at the other end of its standard input; later ones connect to a socket in
the lab's folder, which only their user can enter. One at a time is attached. Without
one for as long as was said, or on SIGTERM, it ends the lab and itself; a watchdog ends
the lab where it is killed.
"""

import contextlib
import fcntl
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from labkit import timeouts
from labkit.checks import UserError
from labkit.compat import ipyparallel as compat
from labkit.host.agent import about_engines
from labkit.host.agent import print_to
from labkit.host.facts import versions
from labkit.host.watchdog import is_running
from labkit.notebook.cluster.engines import Cluster
from labkit.notebook.cluster.engines import GroupStore
from labkit.notebook.cluster.engines import start_cluster
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.cluster.placement import place_on_hosts
from labkit.notebook.cluster.reach import Engine
from labkit.notebook.hosts.hosts import Hosts
from labkit.notebook.keeper.kept_labs import KeptLab
from labkit.notebook.keeper.kept_labs import Situation
from labkit.notebook.keeper.kept_labs import place
from labkit.notebook.keeper.kept_labs import publish
from labkit.notebook.keeper.lines import Lines
from labkit.notebook.keeper.lines import peer_of
from labkit.notebook.keeper.lines import told_meeting
from labkit.notebook.kernel import interrupts
from labkit.records import Placement

_NUM_THREADS = 8
"""That answer questions at once."""


class Kernel:
    """A kernel at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.lines = Lines(connection)
        self.connection = connection
        self.process: psutil.Process | None = None
        """None until it has said who it is."""
        self.told: set[tuple[str, int]] = set()
        """The engines of whose end it knows."""
        self.told_state: dict[str, Any] = {}
        """What can be reached, as it knows it."""

    @property
    def is_there(self) -> bool:
        """A child that it forked may hold its end of the connection open."""
        return self.process is None or is_running(self.process)

    def send(self, **message: Any) -> None:
        """Nothing where it is gone, which is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.lines.send(message)


class Keeper:
    """A lab's cluster, for one kernel after the other."""

    def __init__(self) -> None:
        self._launcher, self._patience_s = "", 0.0
        self._placements: list[Placement] = []
        self._hosts: Hosts | None = None
        self._cluster: Cluster | None = None
        self._stores: dict[int, GroupStore] = {}
        """Of parts of the lab, by the numbers that the kernel has given them."""
        self._listener: socket.socket | None = None
        self._lock: int | None = None
        """A descriptor of the lab's folder, which this process has locked."""
        self._began = time.time()
        self._kernel: Kernel | None = None
        self._is_ending = False
        self._changes = threading.Lock()
        """Guards who is attached, and whether anybody may."""
        self._changed_at, self._alone_since = time.time(), time.monotonic()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """For the main thread, which an interrupt reaches: what takes time."""
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "labkit-answers")
        self._in_main: dict[str, Callable[..., Any]] = {
            "place": self._place,
            "start": self._start,
            "start_engines": self._start_engines,
            "end_engines": lambda on_stage, ranks: self._running.end_engines(ranks),
            "stop": self._stop,
            "end": self._end,
        }
        self._answers: dict[str, Callable[..., Any]] = {
            **about_engines(self._engine),
            "open_store": self._open_store,
            "close_store": lambda number: self._stores.pop(number).close(),
            "free_port": lambda rank: self._running.free_port(rank),
            "ends_at": lambda: self._running.ends_at,
            "hosts_without": lambda folder: self._running.hosts_without(Path(folder)),
        }

    @property
    def _running(self) -> Cluster:
        if self._cluster is None:
            raise UserError("the lab is stopped")
        return self._cluster

    def serve(self, first: socket.socket) -> None:
        """Do what kernels ask, the first of which is at the end of this connection,
        until the lab has ended."""
        kernel = self._kernel = Kernel(first)
        self._begin_thread(self._hear, kernel)
        self._begin_thread(self._look)
        signal.signal(signal.SIGTERM, lambda *_: self._end_now())
        # What it starts would inherit that SIGINT is ignored, and no function.
        signal.signal(signal.SIGINT, lambda *_: None)
        while True:
            self._jobs.get()()

    def _interrupt(self) -> None:
        """Interrupt the job that the main thread is at, if it is at one."""
        os.kill(os.getpid(), signal.SIGINT)

    def _end_now(self) -> None:
        self._jobs.put(self._end)
        self._interrupt()

    def _begin_thread(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()

    # ---- what kernels ask ----

    def _accept(self, listener: socket.socket) -> None:
        """In a thread: let kernels connect, until the socket is closed."""
        with contextlib.suppress(OSError):
            while True:
                kernel = Kernel(listener.accept()[0])
                self._begin_thread(self._hear, kernel)

    def _hear(self, kernel: Kernel) -> None:
        """In a thread: take what a kernel asks, until it is gone."""
        for message in kernel.lines:
            if message["question"] == "interrupt":
                if kernel is self._kernel:
                    self._interrupt()
                kernel.send(id=message["id"], answer=None)
            elif message["question"] in self._in_main and kernel is self._kernel:
                self._jobs.put(partial(self._work, kernel, message))
            else:
                self._threads.submit(self._answer, kernel, message)
        self._leave(kernel)

    def _answer(self, kernel: Kernel, message: dict[str, Any]) -> None:
        question, arguments = message["question"], message["arguments"]
        try:
            if question == "situation":
                answer: Any = asdict(self._situation())
            elif question == "attach":
                answer = self._attach(kernel, **arguments)
            elif kernel is not self._kernel:
                raise UserError("another kernel is attached")
            else:
                answer = self._answers[question](**arguments)
            kernel.send(id=message["id"], answer=answer)
        except Exception as error:
            kernel.send(id=message["id"], error=type(error).__name__, words=str(error))

    def _work(self, kernel: Kernel, message: dict[str, Any]) -> None:
        """In the main thread: what takes time, and says how far it is; nothing for a
        kernel that has gone while it waited."""
        if kernel is not self._kernel:
            return

        def on_stage(text: str) -> None:
            kernel.send(id=message["id"], stage=text)

        arguments = message["arguments"]
        if (directory := arguments.pop("directory", None)) is not None:
            with contextlib.suppress(OSError):  # it is gone
                os.chdir(directory)
        if (variables := arguments.pop("variables", None)) is not None:
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)
        try:
            with interrupts.held():
                answer = self._in_main[message["question"]](on_stage, **arguments)
            kernel.send(id=message["id"], answer=answer)
        except (Exception, KeyboardInterrupt) as error:
            kernel.send(id=message["id"], error=type(error).__name__, words=str(error))

    # ---- who is attached ----

    def _situation(self) -> Situation:
        with self._changes:
            process = self._kernel.process if self._kernel is not None else None
            pid = None if process is None else process.pid
            return Situation(pid, self._changed_at)

    def _attach(self, kernel: Kernel, pid: int) -> dict[str, Any]:
        with self._changes:
            if self._kernel not in (None, kernel):
                raise UserError("another kernel attached a moment ago")
            if self._is_ending:
                raise UserError("the lab is ending: nobody attached in time")
            kernel.process = psutil.Process(peer_of(kernel.connection, pid))
            self._kernel, self._changed_at = kernel, time.time()
        for number in list(self._stores):  # of the former kernel
            self._stores.pop(number).close()
        return self._described() if self._cluster is not None else {}

    def _leave(self, kernel: Kernel) -> None:
        """A kernel is gone; with it the lab, where that has not started."""
        kernel.lines.close()
        with self._changes:
            if kernel is not self._kernel:
                return
            self._kernel = None
            self._changed_at, self._alone_since = time.time(), time.monotonic()
        if self._cluster is None:
            self._end_now()

    def _look(self) -> None:
        """In a thread: tell the kernel who has ended; end the lab where none comes."""
        said = ""
        while True:
            time.sleep(timeouts.LOOK_S)
            try:
                self._look_once()
            except Exception:  # the lab changes in this moment: at the next look
                if said != (said := traceback.format_exc()):
                    print(said, file=sys.stderr)

    def _look_once(self) -> None:
        kernel, cluster = self._kernel, self._cluster
        if kernel is None:
            if self._is_alone:
                self._jobs.put(self._end_if_alone)
        elif not kernel.is_there:
            kernel.lines.close()
        elif cluster is not None:
            self._tell(kernel, cluster)

    @property
    def _is_alone(self) -> bool:
        """For as long as it may be."""
        alone_s = time.monotonic() - self._alone_since
        return self._kernel is None and alone_s > self._patience_s

    def _tell(self, kernel: Kernel, cluster: Cluster) -> None:
        for rank in list(cluster.ranks):
            engine = cluster.engine(rank)
            if not engine.is_alive and engine.key not in kernel.told:
                kernel.told.add(engine.key)
                kernel.send(ended=[*engine.key], death=asdict(engine.death()))
        engines = map(cluster.engine, cluster.ranks)
        cut_off = {each.key[0] for each in engines if each.is_cut_off}
        state = {
            "unreachable": cluster.unreachable_reason(),
            "cut_off": sorted(cut_off),
        }
        if state != kernel.told_state:
            kernel.told_state = state
            kernel.send(**state)

    # ---- the lab ----

    def _place(
        self, on_stage: Callable[[str], None], options: dict[str, Any]
    ) -> list[dict[str, Any]]:
        asked = StartOptions(**options)
        self._launcher, self._patience_s = asked.started_by, 60 * (asked.keep or 0.0)
        self._placements, hosts = place_on_hosts(asked, on_progress=on_stage)
        if hosts is not None:
            self._hosts = replace(hosts, patience_s=self._patience_s)
        return [asdict(each) for each in self._placements]

    def _start(
        self, on_stage: Callable[[str], None], environment: dict[str, str]
    ) -> dict[str, Any]:
        cluster = start_cluster(
            self._placements,
            hosts=self._hosts,
            environment=environment,
            on_progress=on_stage,
        )
        self._cluster = cluster  # first: what fails from here on ends it
        compat.stop_listening(cluster.client)
        print_to(cluster.folder / "keeper.log")
        with contextlib.suppress(OSError):  # a file system that has no locks
            # systemd-tmpfiles leaves alone what is locked: tmpfiles.d(5).
            self._lock = os.open(cluster.folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        listener = self._listener = place(cluster.folder).listen()
        self._begin_thread(self._accept, listener)
        lab = KeptLab(
            name=f"lab-{os.getpid()}",
            keeper=os.getpid(),
            versions=versions(),
            launcher=self._launcher,
            placements=self._placements,
            began=self._began,
            keep_minutes=self._patience_s / 60,
        )
        publish(cluster.folder, lab)
        return self._described()

    def _start_engines(
        self, on_stage: Callable[[str], None], ranks: list[int]
    ) -> list[Any]:
        self._running.start_engines(ranks, on_progress=on_stage)
        return self._engines(ranks)

    def _stop(self, on_stage: Callable[[str], None]) -> None:
        cluster, self._cluster = self._cluster, None
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # or `accept` would go on waiting
            listener.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if cluster is not None:
            cluster.stop()

    def _end_if_alone(self) -> None:
        with self._changes:
            self._is_ending = self._is_alone
        if self._is_ending:
            self._end()

    def _end(self, on_stage: Callable[[str], None] = lambda text: None) -> None:
        """End the lab, give its hosts back, and end this process."""
        try:
            self._stop(on_stage)
            if self._hosts is not None:
                self._hosts.launcher.close()
        finally:
            os._exit(0)  # its end answers whoever has asked for it

    # ---- what a kernel knows of it ----

    def _described(self) -> dict[str, Any]:
        cluster = self._running
        [connection_file] = cluster.folder.glob("security/*-client.json")
        return {
            "folder": str(cluster.folder),
            "connection_file": str(connection_file),
            "is_local": cluster.is_local,
            "unreachable": cluster.unreachable_reason(),
            "engines": self._engines(cluster.ranks),
        }

    def _engines(self, ranks: Sequence[int]) -> list[Any]:
        """Rank, engine id, host, process id, and the file for its stack, of each."""
        cluster = self._running
        found = []
        for rank in ranks:
            engine = cluster.engine(rank)
            found.append(
                [rank, cluster.engine_id(rank), *engine.key, engine.stack_file]
            )
        return found

    def _engine(self, host: str, pid: int) -> Engine:
        cluster = self._running
        engines = map(cluster.engine, cluster.ranks)
        return next(each for each in engines if each.key == (host, pid))

    def _open_store(self, number: int) -> dict[str, Any]:
        cluster = self._running
        if number == 0:
            meeting = cluster.open_store()
        else:
            if number not in self._stores:
                self._stores[number] = cluster.new_store()
            meeting = self._stores[number].open()
        return told_meeting(meeting)


def main() -> None:
    """Keep a lab for the kernel that has started this."""
    first = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with Path(os.devnull).open("rb") as none:
        os.dup2(none.fileno(), 0)
    Keeper().serve(first)


if __name__ == "__main__":
    main()
