"""Engines that a lab's fork server starts: the notebook's side of it."""

import contextlib
import json
import math
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from labkit import timeouts
from labkit.checks import UserError
from labkit.host.watchdog import FORK_SERVER
from labkit.host.watchdog import is_running


class ForkServerGoneError(UserError):
    """It has ended, by itself or by another's hand."""


class ForkServer:
    """The process from which a lab's engines are forked.

    It imports torch once, so that an engine, also one in place of another that died,
    is there in a moment.
    """

    def __init__(self, environment: dict[str, str], log_file: Path) -> None:
        """Begins to start it: it takes some seconds to import torch."""
        self._log_file = log_file
        self._engines: dict[int, ForkedProcess] = {}
        # No SimpleQueue, which can miss its timeout: see `CellExecution.start_over`.
        self._answers: queue.Queue[ForkedProcess | str] = queue.Queue()
        self._forking = threading.Lock()
        self._is_ready = threading.Event()
        self._channel, theirs = socket.socketpair()
        # Of sending alone: the listener waits as long as the server lives.
        limit = struct.pack("ll", int(timeouts.FORK_S), 0)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs, log_file.open("ab") as log:
            self._process = subprocess.Popen(
                # Not with what lies in the notebook's folder, as a torch.py.
                [sys.executable, "-P", "-m", FORK_SERVER],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._listener = threading.Thread(
            target=self._listen, name="labkit-fork-server", daemon=True
        )
        self._listener.start()

    @property
    def is_alive(self) -> bool:
        """Whether it can start engines, now or in a moment."""
        return self._listener.is_alive()

    def wait_until_ready(self, check: Callable[[], None]) -> None:
        """Until it has imported torch; `check` is called meanwhile, and may raise.

        UserError, with what it printed, where it does not.
        """
        deadline = time.monotonic() + timeouts.START_S
        while not self._is_ready.wait(timeouts.POLL_S):
            check()
            if not self.is_alive:
                raise self._failure("the process that starts the engines has ended")
            if time.monotonic() > deadline:
                raise self._failure(
                    "the process that starts the engines did not import torch within "
                    f"{timeouts.START_S:g} s"
                )

    def fork(
        self,
        arguments: list[str],
        environment: dict[str, str],
        output_file: str,
        check: Callable[[], None] = lambda: None,
    ) -> "ForkedProcess":
        """An engine with these arguments; UserError where none can be started.

        `check` is called while it waits, and may raise. A server that has not answered
        by then is ended, or its answer would be taken for that of a later request.
        """
        try:
            folder = str(Path.cwd())
        except OSError:  # it is gone
            folder = "."
        request = {
            "arguments": arguments,
            "environment": environment,
            "folder": folder,
            "output_file": output_file,
        }
        with self._forking:
            try:
                self._channel.sendall(json.dumps(request).encode() + b"\n")
                answer = self._wait_for_answer(check)
            except OSError as error:
                self._kill()
                failure = self._failure(f"no engine was started: {error}")
                if isinstance(error, ConnectionError):
                    raise ForkServerGoneError(str(failure)) from error
                raise failure from error
            except BaseException:
                self._kill()
                raise
        if isinstance(answer, str):
            failure = self._failure(f"no engine was started: {answer}")
            raise failure if self.is_alive else ForkServerGoneError(str(failure))
        return answer

    def _wait_for_answer(self, check: Callable[[], None]) -> "ForkedProcess | str":
        deadline = time.monotonic() + timeouts.FORK_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=timeouts.POLL_S)
            check()
            if not self.is_alive and self._answers.empty():
                return "the process that forks engines has ended"
        raise TimeoutError(
            f"the process that forks engines has not answered for {timeouts.FORK_S:g} s"
        )

    def _kill(self) -> None:
        self._process.kill()
        self._listener.join()

    def join(self) -> None:
        """Wait until it has ended: by a SIGTERM, once its engines have."""
        self._listener.join()

    def _listen(self) -> None:
        """In a thread: take in what the server sends until it has ended."""
        with (
            self._channel,
            self._channel.makefile("rb") as lines,
            contextlib.suppress(ConnectionResetError),  # it ended, a request unread
        ):
            for line in lines:
                self._take(json.loads(line))
        self._process.wait()
        for engine in self._engines.values():
            engine.is_orphan = True

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"ready": _}:
                self._is_ready.set()
            case {"pid": pid}:
                try:
                    self._engines[pid] = ForkedProcess(pid)
                except psutil.NoSuchProcess:
                    self._answers.put("the new process ended at once")
                else:
                    self._answers.put(self._engines[pid])
            case {"error": why}:
                self._answers.put(why)
            case {"ended": pid, "code": code}:
                if engine := self._engines.pop(pid, None):
                    engine.set_ended(code)

    def log(self) -> str:
        """What it printed, as an engine that failed before it had a file of its own."""
        try:
            return self._log_file.read_text(errors="replace").strip()
        except OSError:  # the lab is over
            return ""

    def _failure(self, what: str) -> UserError:
        said = self.log()
        words = "\n".join((said or "(nothing)").splitlines()[-15:])
        return UserError(f"{what}; it printed:\n{words}")


class ForkedProcess(psutil.Process):
    """An engine. It is not this process's child: the fork server has its exit code."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self._has_ended = threading.Event()
        self._exit_code: int | None = None
        self.is_orphan = False
        """Whether the server has ended before it."""

    def set_ended(self, exit_code: int) -> None:
        """Note that it has ended, and how: as `subprocess.Popen.returncode`."""
        self._exit_code = exit_code
        self._has_ended.set()

    def wait(  # type: ignore[override]
        self, timeout: float | None = None
    ) -> int | None:
        """As `psutil.Process.wait`: its exit code once it has ended; None where nobody
        can tell it, as the fork server is gone."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._has_ended.wait(
            max(0, min(self._look_s(), deadline - time.monotonic()))
        ):
            if not is_running(self):
                if (code := exit_code_of_zombie(self.pid)) is not None:
                    self.set_ended(code)  # the server has not reaped it: it is stopped
                else:
                    self._has_ended.wait(0 if self.is_orphan else timeouts.REPORT_S)
                break
            if time.monotonic() >= deadline:
                raise psutil.TimeoutExpired(timeout or 0, self.pid)
        return self._exit_code

    def _look_s(self) -> float:
        return timeouts.LOOK_S if self.is_orphan else timeouts.LOOK_AGAIN_S


def exit_code_of_zombie(pid: int) -> int | None:
    """How a process ended that its parent has not reaped; None where Linux does not
    tell, or it has been reaped. Field 52 of /proc/PID/stat, as proc(5) counts."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, _, text = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        state, *fields = text.split()
        if state == "Z":
            return os.waitstatus_to_exitcode(int(fields[52 - 4]))
    return None
