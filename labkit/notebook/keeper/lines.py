"""Lines of JSON, both ways, between a kernel and the keeper of its lab."""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from labkit.checks import UserError
from labkit.key_server import Meeting

_PEER = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED has them: unix(7)."""


class Lines:
    """One end of a connection; many threads may send, and one reads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """OSError where the other end is gone."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._connection.sendall(line)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """What comes, until the other end is gone, or this one is closed."""
        with contextlib.suppress(OSError, ValueError):  # of half a line, at the end
            for line in self._reader:
                yield json.loads(line)

    def close(self) -> None:
        """From any thread: end it, also for who reads."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def peer_of(connection: socket.socket, told: int) -> int:
    """The process that has connected there, or listens; UserError for another user's.
    As it was `told` where the system (other than Linux) does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return told
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(found)
    if uid != os.getuid():
        raise UserError(
            f"process {pid}, at the other end of the connection, is user {uid}'s and "
            f"not {os.getuid()}'s"
        )
    if not pid:
        raise UserError(
            "the process at the other end of the connection is in a container of its "
            "own: a lab is kept for kernels that see its processes"
        )
    return int(pid)


def told_meeting(meeting: Meeting) -> dict[str, Any]:
    """A place as JSON has it."""
    return {**asdict(meeting), "secret": meeting.secret.hex()}


def heard_meeting(told: dict[str, Any]) -> Meeting:
    """The place that `told_meeting` has told."""
    address, secret = tuple(told["address"]), bytes.fromhex(told["secret"])
    return Meeting(**{**told, "address": address, "secret": secret})
