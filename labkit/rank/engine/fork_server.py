"""Forks a lab's engines from a process that has torch imported: all for one import.

Run as `python -m labkit.rank.engine.fork_server`, its stdin a stream socket from the
notebook. Lines of JSON go over it: {"ready": true} when torch is imported, then a
`ForkRequest` of the notebook's, each answered by {"pid": ...} or {"error": ...}; and
{"ended": pid, "code": exit code} when an engine has.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.unsent import shared_pages

_IS_LINUX = sys.platform == "linux"
_PIECE = 2**16
_MOST_PIECES = 16
"""That are read of what an engine has left: what it has started may go on."""


@dataclass(frozen=True)
class ForkRequest:
    """An engine that is to be started."""

    arguments: list[str]
    """Of `python -m ipyparallel.engine`."""
    environment: dict[str, str]
    folder: str
    """Its working directory."""
    output_file: str


@dataclass(frozen=True)
class Engine:
    """An engine that was started."""

    log_file: Path
    """For native output alone."""
    pipes: list[tuple[int, int]]
    """Through which it comes to the engine."""

    def use(self) -> None:
        """Be this engine, as far as its native output goes."""
        mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        given = sys.modules["labkit.rank.terminal.native_output"].from_server
        given.log, given.pipes = os.open(self.log_file, mode, 0o600), self.pipes
        with contextlib.suppress(OSError):  # the disk is full, say
            given.unsent = shared_pages(self.log_file.with_suffix(".unsent"))

    def keep_last_words(self) -> None:
        """Add to the log what is left in the pipes: what it has not read itself."""
        with contextlib.suppress(OSError), self.log_file.open("ab") as log:
            for pipe, _ in self.pipes:
                log.writelines(left_in(pipe))

    def close(self) -> None:
        """Close the ends of the pipes that the server has."""
        for pipe, _ in self.pipes:
            os.close(pipe)


def left_in(pipe: int) -> Iterator[bytes]:
    """What is in a pipe already, in pieces."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    for _ in range(_MOST_PIECES):
        if not waiting.poll(0):
            return
        yield os.read(pipe, _PIECE)


def main() -> None:
    """Serve until the notebook is gone; in each fork, be an engine."""
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if _IS_LINUX:
        preload()
    if request := ForkServer(channel).serve():
        become_engine(request)


def preload() -> None:
    """Import what every engine needs, and freeze it: a collection in an engine would
    copy the pages that it shares with the others."""
    gc.disable()  # collections take a sixth of the imports' time
    importlib.import_module("ipyparallel.engine.app")
    importlib.import_module("labkit.rank.engine.rpc").import_for_first_cells()
    # And none here, which would find little in a quarter of a second.
    importlib.import_module("labkit.rank.group.recovery").freeze_libraries()
    gc.enable()


class ForkServer:
    """Forks on request, and reports how each fork ended."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._received = b""
        self._hears = True
        self._is_ending = False
        self._engines: dict[int, Engine] = {}
        # A signal ends a wait in `select` by a byte in this pipe.
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._send(ready=True)

    def _end(self, *_: Any) -> None:
        """Engines that were sent the same signal are to be reaped first."""
        self._is_ending = True

    def serve(self) -> ForkRequest | None:
        """Returns in each fork, with what it is to be; here, when all is over."""
        while not self._is_ending or self._engines:
            sources: list[Any] = [self._woken]
            if self._hears:
                sources.append(self._channel)
            ready, _, _ = select.select(sources, [], [])
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._reap()
            if self._channel in ready:
                data = self._channel.recv(1 << 16)
                if not data:  # the notebook is gone: the watchdog ends the engines
                    self._hears, self._is_ending = False, True
                *lines, self._received = (self._received + data).split(b"\n")
                for line in lines:
                    request = ForkRequest(**json.loads(line))
                    if self._fork(request):
                        return request
        return None

    def _fork(self, request: ForkRequest) -> bool:
        """Whether this is the new process."""
        engine = Engine(Path(request.output_file).with_suffix(".native"), [])
        try:
            for _ in range(2):
                engine.pipes.append(os.pipe())
            pid = os.fork()
        except OSError as error:
            engine.close()
            for _, end in engine.pipes:
                os.close(end)
            self._send(error=f"{error.strerror}")
            return False
        if pid == 0:
            self._leave()
            if _IS_LINUX:
                engine.use()
            return True
        for _, end in engine.pipes:
            os.close(end)
        self._engines[pid] = engine
        self._send(pid=pid)
        return False

    def _leave(self) -> None:
        """Let this process, a fork, have nothing of the server's."""
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self._woken, self._wake):
            os.close(end)
        for other in self._engines.values():
            other.close()
        self._channel.close()

    def _reap(self) -> None:
        for pid in list(self._engines):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                engine = self._engines.pop(pid)
                engine.keep_last_words()
                engine.close()
                self._send(ended=pid, code=os.waitstatus_to_exitcode(status))

    def _send(self, **content: Any) -> None:
        with contextlib.suppress(OSError):  # the notebook is gone
            self._channel.sendall(json.dumps(content).encode() + b"\n")


def become_engine(request: ForkRequest) -> None:
    """Be what `python -m ipyparallel.engine` would be, in a session of its own."""
    os.setsid()
    output = os.open(request.output_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    try:
        os.chdir(request.folder)
    except OSError:  # it is gone
        os.chdir("/")
    # What modules have noted when they were imported, or have in this folder.
    tempfile.tempdir = None
    folder = str(Path.cwd())
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(request.environment)
    arguments = [*request.arguments, f"--work-dir={folder}"]
    if not can_be_engine():
        command = [sys.executable, "-P", "-m", "ipyparallel.engine", *arguments]
        os.execv(sys.executable, command)
    sys.modules["numpy"].random.seed()  # the module random does so by itself
    sys.argv[1:] = arguments
    runpy.run_module("ipyparallel.engine", run_name="__main__", alter_sys=True)


def can_be_engine() -> bool:
    """Whether all that was imported works in this fork.

    The frameworks of macOS, which torch loads, work in no fork: nothing was imported
    there. CUDA does not in a fork of a process that has called it, as a module that
    torch imports may.
    """
    if not _IS_LINUX:
        return False
    from labkit.compat.torch import is_cuda_lost

    return not is_cuda_lost()


if __name__ == "__main__":
    main()
