"""The store at which the ranks of a group meet: the notebook serves it."""

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from labkit.key_server import KeyConnection
from labkit.key_server import Meeting


class LabStore(dist.Store):
    """Keys and values of one formation of the process group, for this user alone.

    torch's `TCPStore` listens on a port, where every user of the host can read, change
    and delete keys. Its `FileStore` writes a record in several steps: where one was cut
    short, by a full disk or a SIGKILL, every rank spins in native code. This one waits
    in Python, which hears a signal, and needs neither a disk nor rank 0.
    """

    timeout: timedelta

    def __init__(self, meeting: Meeting, timeout: timedelta) -> None:
        """`meeting` is where the notebook's `KeyServer` is."""
        super().__init__()
        self.set_timeout(timeout)
        self._meeting = meeting
        self._using = threading.Lock()
        self._connection: KeyConnection | None = KeyConnection(meeting)
        self._is_closed = False
        self._was_cut_short = False
        self._clones: list[LabStore] = []  # torch alone would not keep them alive

    @property
    def is_broken(self) -> bool:
        """Whether a call did not end: ranks may then have made different groups."""
        return self._was_cut_short or any(each.is_broken for each in self._clones)

    def close(self) -> None:
        """From any thread: let what waits here, or in a clone, raise; for good."""
        self._is_closed = True
        if (connection := self._connection) is not None:
            connection.shut()
        for each in list(self._clones):
            each.close()

    def _call(self, operation: str, *arguments: Any) -> Any:
        with self._using:
            try:
                if self._connection is None:
                    self._connection = KeyConnection(self._meeting)
                if self._is_closed:
                    raise ConnectionError("this process group has been left")
                return self._connection.call(operation, *arguments)
            except BaseException as error:  # by an interrupt, too: an answer may come
                self._was_cut_short = True
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                if isinstance(error, OSError):
                    raise dist.DistNetworkError(str(error)) from error
                raise

    # ---- what torch calls ----

    def clone(self) -> "LabStore":
        clone = LabStore(self._meeting, self.timeout)
        self._clones.append(clone)
        if self._is_closed:
            clone.close()
        return clone

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, _text(value))

    def get(self, key: str) -> bytes:
        value = self._call("get", key, self.timeout.total_seconds())
        if value is None:
            raise _timed_out([key], self.timeout)
        return _bytes(value)

    # Without these, gloo asks for the address of each rank by itself.

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._call("multi_get", keys, self.timeout.total_seconds())
        if values is None:
            raise _timed_out(keys, self.timeout)
        return list(map(_bytes, values))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._call("multi_set", keys, list(map(_text, values)))

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", key, _text(value))

    def add(self, key: str, value: int) -> int:
        return int(self._call("add", key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout = self.timeout if timeout is None else timeout
        if not self._call("wait", keys, timeout.total_seconds()):
            raise _timed_out(keys, timeout)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return _bytes(
            self._call("compare_set", key, _text(expected_value), _text(desired_value))
        )

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", key))

    def num_keys(self) -> int:
        return int(self._call("num_keys"))

    # What a PrefixStore calls, of a store in Python.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


def _text(value: str | bytes) -> str:
    """Any bytes as JSON can have them; a user gives a str, torch bytes."""
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _timed_out(keys: list[str], timeout: timedelta) -> dist.DistStoreError:
    return dist.DistStoreError(
        f"within {timeout.total_seconds():g} s, no rank has set {', '.join(keys)}"
    )
