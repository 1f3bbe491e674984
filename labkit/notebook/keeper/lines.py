"""Lines of JSON, both ways, between a kernel and the keeper of its lab."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from labkit.key_server import Meeting


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


def told_meeting(meeting: Meeting) -> dict[str, Any]:
    """A place as JSON has it."""
    return {**asdict(meeting), "secret": meeting.secret.hex()}


def heard_meeting(told: dict[str, Any]) -> Meeting:
    """The place that `told_meeting` has told."""
    address, secret = tuple(told["address"]), bytes.fromhex(told["secret"])
    return Meeting(**{**told, "address": address, "secret": secret})
