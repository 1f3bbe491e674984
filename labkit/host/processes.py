"""What a lab has on this host: its folder, its processes, and what watches them."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from collections.abc import Collection
from pathlib import Path

import psutil

from labkit import timeouts
from labkit.host import watchdog
from labkit.host.exit_cause import EngineProcess
from labkit.host.forked_engines import ForkedProcess
from labkit.host.forked_engines import ForkServer
from labkit.host.forked_engines import ForkServerGoneError


class Host:
    """A lab's processes on this host, which a watchdog ends when this one is gone.

    It forks engines, looks at what is to be watched now and then, and ends all of it.
    """

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        *,
        check: Callable[[], None] = lambda: None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder` is the lab's own here, and is removed at the end. `check` is called
        while something is waited for, and may raise; `on_look`, in a thread, after each
        look at the processes.
        """
        self.folder = folder
        self.token = uuid.uuid4().hex
        """In the environment of every process of the lab on this host."""
        self.environment = {**environment, watchdog.TOKEN_VARIABLE: self.token}
        """What such a process has besides this one's."""
        self._check = check
        self._on_look = on_look
        self._watched: list[EngineProcess] = []
        self._watchdog = self._start_watchdog()
        self._fork_server: ForkServer | None = None
        self._is_ending = threading.Event()
        self._supervisor = threading.Thread(
            target=self._supervise, name="labkit-supervisor", daemon=True
        )
        self._supervisor.start()

    # ---- what starts engines ----

    def start_fork_server(self) -> ForkServer:
        """Begin to start what forks engines, unless it is there."""
        if self._fork_server is None or not self._fork_server.is_alive:
            log_file = self.folder / "fork-server.log"
            self._fork_server = ForkServer(self.environment, log_file)
        return self._fork_server

    def prepare_to_fork(self) -> ForkServer:
        """Wait until engines can be forked."""
        server = self.start_fork_server()
        server.wait_until_ready(self._check)
        return server

    def fork(
        self, arguments: list[str], environment: dict[str, str], output_file: str
    ) -> ForkedProcess:
        """An engine with these arguments; UserError where none can be started."""
        request = arguments, environment, output_file, self._check
        try:
            return self.prepare_to_fork().fork(*request)
        except ForkServerGoneError:  # a moment ago: it was there when this began
            return self.prepare_to_fork().fork(*request)

    def fork_log(self) -> str:
        """What was printed by what forks engines."""
        return "" if self._fork_server is None else self._fork_server.log()

    # ---- what watches over them ----

    def watch(self, process: EngineProcess) -> None:
        """Look at it from now on, until it has ended."""
        self._watched.append(process)

    def _start_watchdog(self) -> "subprocess.Popen[bytes]":
        environment = dict(os.environ)
        # In a lab that runs inside another's rank: the other's end is to end our
        # kernel, and our watchdog is to outlive it for a moment.
        environment.pop(watchdog.TOKEN_VARIABLE, None)
        # No argument, which every user of the host could read.
        environment[watchdog.WATCHED_VARIABLE] = self.token
        return subprocess.Popen(
            [sys.executable, "-P", watchdog.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def _supervise(self) -> None:
        """In a thread: look at every process now and then; keep the watchdog."""
        while not self._is_ending.wait(timeouts.LOOK_S):
            for each in list(self._watched):
                if not each.is_alive:
                    self._watched.remove(each)
                each.look()
            self._on_look()
            if self._watchdog.poll() is not None:
                with contextlib.suppress(OSError):  # then at the next look
                    former, self._watchdog = self._watchdog, self._start_watchdog()
                    former.stdin.close()  # type: ignore[union-attr]

    # ---- the end ----

    def end_sessions(self, pids: Collection[int]) -> None:
        """Kill what is left of the sessions that engines have led, such as the workers
        of their DataLoaders."""
        for process in watchdog.find_processes(self.token):
            with contextlib.suppress(OSError, psutil.Error):
                is_theirs = os.getsid(process.pid) in pids
                if is_theirs and not watchdog.is_tidying(process):
                    process.kill()

    def stop_looking(self) -> None:
        """Look at no process any more, and leave the watchdog as it is."""
        self._is_ending.set()
        self._supervisor.join()

    def end(self) -> None:
        """End every process of the lab's here, and wait until they are; remove its
        folder."""
        self.stop_looking()
        if self._watchdog.stdin is not None and not self._watchdog.stdin.closed:
            # A child that this process forked, as a DataLoader's worker, has the pipe
            # too: that it is closed here would not tell the watchdog.
            with contextlib.suppress(OSError):  # it is gone
                self._watchdog.stdin.write(b"\n")
                self._watchdog.stdin.close()
        if self._watchdog.wait() != 0:  # somebody ended it
            watchdog.clean_up(self.token, str(self.folder))
        if self._fork_server is not None:
            self._fork_server.join()


def free_port() -> int:
    """A port on which nobody listens on this host."""
    with socket.socket() as own:
        own.bind(("", 0))
        port: int = own.getsockname()[1]
    return port
