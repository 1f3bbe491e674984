"""Keys and values that processes of one user share: their server, and a connection.

Over a Unix socket who may enter the folder that it lies in may connect, nobody else.
Over TCP each end shows the other that it knows the secret of their place, by the
challenges of `multiprocessing.connection` (HMAC), before anything else is read.
"""

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from multiprocessing.connection import answer_challenge
from multiprocessing.connection import deliver_challenge
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from labkit import timeouts

_MAX_ADDRESS_BYTES = 100
"""Of a socket's path; the system takes 104 to 108."""


@dataclass(frozen=True)
class Meeting:
    """Where a `KeyServer` is found: a Unix socket, or an address that other hosts
    reach."""

    path: str = ""
    """Of the Unix socket; "" over TCP."""
    address: tuple[str, int] = ("", 0)
    """An IP address and a port, which is 0 for any that is free."""
    name: str = ""
    """By which it is told from all others of the lab, over TCP."""
    secret: bytes = field(
        default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False
    )
    """What both ends know, over TCP."""

    def __str__(self) -> str:
        return self.path or "{} at {}:{}".format(self.name, *self.address)

    def listen(self) -> socket.socket:
        """A socket that waits for connections there."""
        if not self.path:
            return socket.create_server(self.address, backlog=128)
        listener = socket.socket(socket.AF_UNIX)
        with _short_name(Path(self.path)) as name:
            listener.bind(name)
        listener.listen(128)
        return listener

    def connect(self) -> socket.socket:
        """A connection to whoever serves there; OSError where nobody does."""
        if not self.path:
            connection = socket.create_connection(self.address, timeouts.ANSWER_S)
            connection.settimeout(None)
            self.authenticate(connection, is_server=False)
            return connection
        connection = socket.socket(socket.AF_UNIX)
        # Who listens may be stopped, and as many may wait already as can.
        _limit(connection, socket.SO_SNDTIMEO, timeouts.ANSWER_S)
        with _short_name(Path(self.path)) as name:
            connection.connect(name)
        _limit(connection, socket.SO_SNDTIMEO, 0)
        return connection

    def authenticate(self, connection: socket.socket, *, is_server: bool) -> None:
        """Over TCP: be sure of the other end; ConnectionError for a stranger's."""
        if self.path:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _limit(connection, socket.SO_RCVTIMEO, timeouts.ANSWER_S)
        steps = [deliver_challenge, answer_challenge]
        try:
            with Connection(os.dup(connection.fileno())) as ends:
                for step in steps if is_server else reversed(steps):
                    step(ends, self.secret)
        except (AuthenticationError, EOFError, AssertionError) as error:
            raise ConnectionError(
                f"who has answered for {self} does not know its secret"
            ) from error
        _limit(connection, socket.SO_RCVTIMEO, 0)


def _limit(connection: socket.socket, what: int, seconds: float) -> None:
    """Let a read, or a write, that lasts longer fail; 0 for no limit."""
    limit = struct.pack("ll", int(seconds), 0)
    connection.setsockopt(socket.SOL_SOCKET, what, limit)


class KeyServer:
    """Serves its keys and values in threads, until it is closed; no disk is needed."""

    def __init__(self, meeting: Meeting) -> None:
        """`meeting` is where it is to be."""
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._operations: dict[str, Callable[..., Any]] = {
            "set": self._set,
            "get": self._get,
            "multi_get": self._multi_get,
            "multi_set": self._multi_set,
            "append": lambda key, value: self._set(
                key, self._values.get(key, "") + value
            ),
            "add": self._add,
            "wait": self._wait,
            "check": self._has,
            "compare_set": self._compare_set,
            "delete_key": lambda key: self._values.pop(key, None) is not None,
            "num_keys": lambda: len(self._values),
        }
        self._listener = meeting.listen()
        if not meeting.path:
            meeting = replace(meeting, address=self._listener.getsockname())
        self.meeting = meeting
        """Where it is."""
        self._served: dict[threading.Thread, socket.socket] = {}
        self._end, self._ended = socket.socketpair()
        self._accepting = threading.Thread(
            target=self._accept, name="labkit-keys", daemon=True
        )
        self._accepting.start()

    def close(self) -> None:
        """End every connection, also those that wait, and forget the values."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._end.send(b"\n")  # a child that this process forked has it open too
        self._accepting.join()
        self._end.close()
        self._listener.close()
        self._ended.close()
        if self.meeting.path:
            Path(self.meeting.path).unlink(missing_ok=True)
        for thread, connection in self._served.items():
            _shut(connection)
            thread.join()

    # ---- in its threads ----

    def _accept(self) -> None:
        while self._ended not in wait([self._listener, self._ended]):
            try:
                connection = self._listener.accept()[0]
            except OSError:  # this process has no descriptor left
                time.sleep(timeouts.POLL_S)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="labkit-keys", daemon=True
            )
            served = {t: s for t, s in self._served.items() if t.is_alive()}
            self._served = {**served, thread: connection}
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        # The other end may go at any moment, or add to what is no number.
        gone = contextlib.suppress(OSError, ValueError)
        with gone, connection, connection.makefile("rwb") as io:
            self.meeting.authenticate(connection, is_server=True)
            while (line := io.readline()).endswith(b"\n"):
                operation, *arguments = json.loads(line)
                with self._changed:
                    answer = self._operations[operation](*arguments)
                    if self._is_closed:
                        return
                io.write(json.dumps(answer).encode() + b"\n")
                io.flush()

    def _set(self, key: str, value: str) -> None:
        self._values[key] = value
        self._changed.notify_all()

    def _get(self, key: str, timeout_s: float) -> str | None:
        self._wait([key], timeout_s)
        return self._values.get(key)

    def _multi_get(self, keys: list[str], timeout_s: float) -> list[str] | None:
        all_there = self._wait(keys, timeout_s)
        return [self._values[key] for key in keys] if all_there else None

    def _multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._set(key, value)

    def _add(self, key: str, number: int) -> int:
        total = int(self._values.get(key, "0")) + number
        self._set(key, str(total))
        return total

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._changed.wait_for(lambda: self._is_closed or self._has(keys), timeout_s)
        return self._has(keys)

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        if self._values.get(key, "") == expected:
            self._set(key, desired)
        return self._values.get(key, expected)


class KeyConnection:
    """A connection to a `KeyServer`; one thread uses it at a time."""

    def __init__(self, meeting: Meeting) -> None:
        """OSError where nobody serves there, or a stranger does."""
        self._socket = meeting.connect()
        self._io = self._socket.makefile("rwb")

    def call(self, operation: str, *arguments: Any) -> Any:
        """What the server answers; after an exception it is to be closed."""
        self._io.write(json.dumps([operation, *arguments]).encode() + b"\n")
        self._io.flush()
        line = self._io.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the server of keys has closed the connection")
        return json.loads(line)

    def shut(self) -> None:
        """From any thread: let a call that waits fail."""
        _shut(self._socket)

    def close(self) -> None:
        """Be done with it."""
        self.shut()
        with contextlib.suppress(OSError):  # of a call that was not sent as a whole
            self._io.close()
        self._socket.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end has gone, or this one
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """A name of `path` that is short enough for a socket."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
