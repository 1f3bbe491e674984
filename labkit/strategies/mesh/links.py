"""Links between the ranks of a group, over which they compare what they do.

A collective of gloo wakes a thread for every message of a ring: all-reducing 160 bytes
takes 0.5 ms of two ranks on two cores, and 16 ms of eight. There are several in a step
of some strategies. Here each rank sends its bytes to each of the others, and reads
theirs in the thread that waits for them: 20 µs, and 0.6 ms.
"""

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import psutil
import torch.distributed as dist
from torch.profiler import record_function

from labkit import timeouts
from labkit.compat.c10d import default_store
from labkit.compat.c10d import timeout_of
from labkit.compat.torch import is_profiled
from labkit.compat.torch import no_dispatch
from labkit.records import COMPARE_MARK

Key = tuple[bool, int]
"""Which exchange of a group it is: whether it is one apart, and its number, from 1."""

_HEADER = struct.Struct("<?QQ")
"""A message: its key, and how many bytes follow."""
_HELLO = struct.Struct("<32sI")
"""What the one that connects says first: the other's token, and its own place."""
_MOST = 2**16
"""Bytes that are read at once. For more than twice that Python has the system map
memory, and takes it away again: 14 µs for each message, in place of 2."""
_MOST_KEPT = 1000
"""Exchanges of a kind, the newest, whose bytes are kept until they are waited for: not
all are."""


class Link:
    """A connection to one rank, and what is on its way there and back."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self.socket = connected
        self.unsent = bytearray()
        self.error: OSError | None = None
        """Why no more comes from there."""
        self._unread = bytearray()

    def flush(self) -> None:
        """Send as much as the other rank's host takes now."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # it has gone; what it sent before may be there still
            self.unsent.clear()

    def read(self) -> list[tuple[Key, bytes]]:
        """The messages that have come since; ConnectionError where none will."""
        try:
            found = self.socket.recv(_MOST)
        except BlockingIOError:
            return []
        if not found:
            raise ConnectionError("it has closed the connection")
        self._unread += found
        messages = []
        while len(self._unread) >= _HEADER.size:
            is_apart, number, size = _HEADER.unpack_from(self._unread)
            end = _HEADER.size + size
            if len(self._unread) < end:
                break
            payload = bytes(self._unread[_HEADER.size : end])
            messages.append(((is_apart, number), payload))
            del self._unread[:end]
        return messages


@dataclass
class Links:
    """This rank's links to all others of a group."""

    ranks: list[int]
    """The group's, in their order there."""
    place: int
    """This rank's among them."""
    timeout_s: float
    number: int = 0
    """Which of the links that the same ranks have: a group of theirs has its own."""
    is_broken: bool = True
    """Whether they are not made yet, or not all, or an exchange was cut short: what
    comes next may be half of a message."""
    waits_since_ns: int = 0
    """When this rank began to wait for what others are to send, by `time.time_ns`; 0
    while it does not."""
    waits_for: Key = (False, 0)
    """For which of them."""
    _num_begun: dict[bool, int] = field(default_factory=lambda: defaultdict(int))
    _came: dict[Key, dict[int, bytes]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _is_reading: bool = False
    """Whether a thread waits for the sockets, and others wait for what it finds."""

    def __post_init__(self) -> None:
        # Entered by itself: an interrupt within `Condition.__enter__`, which is in
        # Python, would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.links: dict[int, Link] = {}
        """By the place of the other rank."""
        self._places: dict[int, int] = {}
        """The same by the number of the socket."""
        self._poll = select.poll()

    @property
    def name(self) -> str:
        """The same on all of its ranks."""
        return f"links {self.number} of {self.ranks}"

    def make(self, store: Any, *, apart: bool) -> None:
        """Connect to the others, who meet at `store`, for the first exchange: this rank
        waits in it already, as the others see. Collective."""
        with self._lock:
            self.waits_for, self.waits_since_ns = (apart, 1), time.time_ns()
            try:
                made = connect(store, self.place, len(self.ranks), self.timeout_s)
            finally:
                self.waits_since_ns = 0
            for place, connected in made.items():
                self.links[place] = Link(connected)
                self._places[connected.fileno()] = place
                self._poll.register(connected, select.POLLIN)
            self.is_broken = False

    def num_begun(self, *, apart: bool) -> int:
        """Exchanges so far."""
        return self._num_begun[apart]

    def begin(self, payload: bytes, *, apart: bool) -> Key:
        """Send this rank's bytes to all others. Collective."""
        with self._lock:
            self._check_whole()
            try:
                self._num_begun[apart] += 1
                key = apart, self._num_begun[apart]
                self._came.pop((apart, key[1] - _MOST_KEPT), None)
                message = _HEADER.pack(*key, len(payload)) + payload
                for link in self.links.values():
                    if link.error is None:
                        link.unsent += message
                        link.flush()
            except BaseException:
                self.is_broken = True
                raise
        return key

    def wait(self, key: Key) -> dict[int, bytes]:
        """What the others have sent for an exchange that has begun, by place."""
        with self._lock:
            self._check_whole()
            try:
                came = self._came[key]
                self._read(self.links.keys() - came.keys())
                if not self._is_done(key):
                    self._await(key)
                return self._came.pop(key)
            except BaseException:  # an interrupt, too, may cut a message in two
                self.is_broken = True
                raise

    def close(self) -> None:
        self.is_broken = True
        for each in self.links.values():
            each.socket.close()

    def _check_whole(self) -> None:
        if self.is_broken:
            raise RuntimeError("an earlier comparison of the ranks was cut short")

    def _is_done(self, key: Key) -> bool:
        """Whether all has come, and others have what they wait for: no thread sends the
        rest of a long message later."""
        has_come = len(self._came[key]) == len(self.links)
        return has_come and not [each for each in self.links.values() if each.unsent]

    def _await(self, key: Key) -> None:
        deadline = time.monotonic() + self.timeout_s
        self.waits_for, self.waits_since_ns = key, time.time_ns()
        try:
            while not self._is_done(key):
                self._check_connected(key)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RuntimeError(self._timed_out(key))
                if self._is_reading:
                    self._changed.wait(left)
                else:
                    self._read_next(left)
        finally:
            self.waits_since_ns = 0

    def _read_next(self, timeout_s: float) -> None:
        """Wait for any of the others; meanwhile other threads may begin to."""
        for link in self.links.values():
            if link.error is None:
                events = select.POLLIN | (select.POLLOUT if link.unsent else 0)
                self._poll.modify(link.socket, events)
        self._is_reading = True
        try:
            self._lock.release()  # here: an interrupt may come as it returns
            ready = self._poll.poll(timeout_s * 1e3)
        finally:
            self._lock.acquire()
            self._is_reading = False
            self._changed.notify_all()
        places = [self._places[number] for number, _ in ready]
        for place in places:
            self.links[place].flush()
        self._read(places)

    def _read(self, places: Iterable[int]) -> None:
        for place in places:
            link = self.links[place]
            try:
                for key, payload in link.read():
                    is_apart, number = key
                    if number > self._num_begun[is_apart] - _MOST_KEPT:
                        self._came[key][place] = payload
            except OSError as error:
                if link.error is None:
                    self._poll.unregister(link.socket)
                link.error = error
                link.unsent.clear()

    def _check_connected(self, key: Key) -> None:
        """RuntimeError where one has gone that has not sent its bytes: those that have
        may go, as into a group of their own."""
        for place, link in self.links.items():
            if link.error is not None and place not in self._came[key]:
                lost = f"the connection to rank {self.ranks[place]} is lost"
                raise RuntimeError(f"{lost}: {link.error}") from link.error

    def _timed_out(self, key: Key) -> str:
        there = self._came[key].keys() | {self.place}
        missing = [str(r) for place, r in enumerate(self.ranks) if place not in there]
        return (
            f"Timed out after {self.timeout_s:g} s, in which rank"
            f"{'s' * (len(missing) > 1)} {', '.join(missing)} did not come to a "
            "comparison with this one"
        )


_links: dict[Any, Links] = {}
"""By group."""


def links_of(group: Any, *, apart: bool) -> Links:
    """Those among the ranks of `group`; made where there are none, for an exchange of
    this kind. Collective, for these ranks."""
    if group not in _links:
        ranks = dist.get_process_group_ranks(group)
        number = sum(each.ranks == ranks for each in _links.values())
        timeout_s = min(timeout_of(group).total_seconds(), timeouts.MOST_POLLED_S)
        made = Links(ranks, dist.get_rank(group), timeout_s, number)
        # Before they are made: where that fails, the store has keys of these still.
        _links[group] = made
        made.make(dist.PrefixStore(made.name, default_store()), apart=apart)
    return _links[group]


def forget_links() -> None:
    """Close them, as their groups are about to be left."""
    for each in _links.values():
        each.close()
    _links.clear()


def num_links() -> int:
    """How many groups have them: on all their ranks, where all is well."""
    return len(_links)


def are_whole() -> bool:
    """Whether no exchange was cut short."""
    return not any(each.is_broken for each in list(_links.values()))


def waiting() -> Links | None:
    """The links at which this rank waits for others, if it does: since longest."""
    found = [each for each in list(_links.values()) if each.waits_since_ns]
    return min(found, key=lambda each: each.waits_since_ns, default=None)


def num_begun() -> dict[str, int]:
    """Exchanges so far, by their name and kind: the same on all ranks of a group, where
    all is well."""
    return {
        name_of(each, apart=apart): each.num_begun(apart=apart)
        for each in list(_links.values())
        for apart in (False, True)
    }


def name_of(links: Links, *, apart: bool) -> str:
    """By which the ranks know the exchanges of one kind."""
    return f"{links.name}{' apart' * apart}"


class Exchange:
    """Bytes that all ranks of a group have begun to give each other."""

    def __init__(self, group: Any, payload: bytes, *, apart: bool) -> None:
        """Collective."""
        self._payload = payload
        self._links = links_of(group, apart=apart)
        self._key = self._links.begin(payload, apart=apart)

    def wait(self) -> list[bytes]:
        """The bytes of each, in the order of their ranks. To be called once."""
        links = self._links
        if is_profiled():
            ranks = ",".join(map(str, links.ranks))
            # Its mark is an operator, which a mode of the loop's own would see.
            with no_dispatch(), record_function(COMPARE_MARK.format(ranks)):
                found = links.wait(self._key)
        else:
            found = links.wait(self._key)
        found[links.place] = self._payload
        return [found[place] for place in range(len(links.ranks))]


# ---- how they are made ----


def connect(
    store: Any, place: int, size: int, timeout_s: float
) -> dict[int, socket.socket]:
    """A connection to each of the others, by place, who meet at `store`. Collective.

    Whoever can read the store can connect: others that reach the port cannot.
    """
    found: dict[int, socket.socket] = {}
    address = own_address()
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    token = secrets.token_hex(16)
    try:
        with socket.create_server((address, 0), family=kind, backlog=size) as server:
            server.settimeout(timeout_s)
            port = server.getsockname()[1]
            store.set(f"at/{place}", f"{address} {port} {token}")
            told = store.multi_get([f"at/{other}" for other in range(size)])
            for other in range(place):
                to, at, theirs = told[other].decode().split()
                made = socket.create_connection((to, int(at)), timeout_s)
                found[other] = made
                made.sendall(_HELLO.pack(theirs.encode(), place))
            store.set(f"connected/{place}", "1")
            # So that a wait for one that will not come is in the store, which names it.
            store.multi_get([f"connected/{other}" for other in range(place + 1, size)])
            while len(found) < size - 1:
                made, _ = server.accept()
                other = _greeted(made, token)
                if place < other < size and other not in found:
                    found[other] = made
                else:
                    made.close()
    except BaseException:
        for made in found.values():
            made.close()
        raise
    return found


def _greeted(made: socket.socket, token: str) -> int:
    """The place of the one that has connected; -1 where it does not know the token."""
    made.settimeout(timeouts.GREETING_S)
    hello = b""
    with contextlib.suppress(OSError):
        hello = made.recv(_HELLO.size, socket.MSG_WAITALL)
    if len(hello) < _HELLO.size:
        return -1
    said, place = _HELLO.unpack(hello)
    return int(place) if hmac.compare_digest(said, token.encode()) else -1


def own_address() -> str:
    """Where the others reach this rank: on the interface that gloo uses, and where none
    is named on that which leads to the first rank."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if found := address_among(psutil.net_if_addrs().get(interface, [])):
        return found
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    kind, *_, to = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as asked:
        asked.connect(to)  # sends nothing
        return str(asked.getsockname()[0])


def address_among(addresses: Iterable[Any]) -> str:
    """Of an interface's, as psutil has them, the one to be reached at; "" for none. An
    address that holds on a link alone needs the name of the interface there."""
    for kind in (socket.AF_INET, socket.AF_INET6):
        for each in addresses:
            if each.family == kind and "%" not in each.address:
                return str(each.address)
    return ""
