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
from collections.abc import Sequence
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
from labkit.records import COMPARE_MARK

Key = tuple[bool, int]
"""Which exchange of a group it is: whether it is one apart, and its number, from 1."""

_HEADER = struct.Struct("<?QQ")
"""A message: its key, and how many bytes follow."""
_HELLO = struct.Struct("<32sI")
"""What the one that connects says first: the other's token, and its own place."""
_MOST = 2**18
"""Bytes that are read at once."""


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
        self._unread = bytearray()

    def flush(self) -> None:
        """Send as much as the other rank's host takes now."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]

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
    links: dict[int, Link]
    """By the place of the other rank."""
    timeout_s: float
    is_broken: bool = False
    """Whether an exchange was cut short: what comes next may be half of a message."""
    waits_since_ns: int = 0
    """When this rank began to wait for what others are to send, by `time.time_ns`; 0
    while it does not."""
    waits_for: Key = (False, 0)
    """For which of them."""
    _num_begun: dict[bool, int] = field(default_factory=lambda: defaultdict(int))
    _came: dict[Key, dict[int, bytes]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _is_reading: bool = False
    """Whether a thread waits for the sockets, and others wait for what it finds."""

    def __post_init__(self) -> None:
        self._places = {e.socket.fileno(): p for p, e in self.links.items()}
        self._poll = select.poll()
        for each in self.links.values():
            self._poll.register(each.socket, select.POLLIN)

    @property
    def name(self) -> str:
        """The same on all of its ranks."""
        return f"links of {self.ranks}"

    def num_begun(self, *, apart: bool) -> int:
        """Exchanges so far."""
        return self._num_begun[apart]

    def begin(self, payload: bytes, *, apart: bool) -> Key:
        """Send this rank's bytes to all others. Collective."""
        with self._changed:
            self._check_whole()
            try:
                self._num_begun[apart] += 1
                key = apart, self._num_begun[apart]
                self._came.pop((apart, key[1] - _MOST_KEPT), None)
                message = _HEADER.pack(*key, len(payload)) + payload
                for place, link in self.links.items():
                    link.unsent += message
                    self._flush(place)
            except BaseException:
                self.is_broken = True
                raise
        return key

    def wait(self, key: Key) -> dict[int, bytes]:
        """What the others have sent for an exchange that has begun, by place."""
        with self._changed:
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
        for each in self.links.values():
            each.socket.close()

    def _check_whole(self) -> None:
        if self.is_broken:
            raise RuntimeError("an earlier comparison of the ranks was cut short")

    def _is_done(self, key: Key) -> bool:
        """Whether all has come, and others have what they wait for: no thread sends the
        rest of a long message later."""
        has_come = len(self._came[key]) == len(self.links)
        return has_come and not any(each.unsent for each in self.links.values())

    def _await(self, key: Key) -> None:
        deadline = time.monotonic() + self.timeout_s
        self.waits_for, self.waits_since_ns = key, time.time_ns()
        try:
            while not self._is_done(key):
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
            is_full = bool(link.unsent)
            events = select.POLLIN | (select.POLLOUT if is_full else 0)
            if is_full or len(self.links) > 1:
                self._poll.modify(link.socket, events)
        self._is_reading = True
        self._changed.release()
        try:
            ready = self._poll.poll(timeout_s * 1e3)
        finally:
            self._changed.acquire()
            self._is_reading = False
            self._changed.notify_all()
        places = [self._places[number] for number, _ in ready]
        for place in places:
            self._flush(place)
        self._read(places)

    def _read(self, places: Iterable[int]) -> None:
        for place in places:
            try:
                for key, payload in self.links[place].read():
                    is_apart, number = key
                    if number > self._num_begun[is_apart] - _MOST_KEPT:
                        self._came[key][place] = payload
            except OSError as error:
                raise self._lost(place, error) from error

    def _flush(self, place: int) -> None:
        try:
            self.links[place].flush()
        except OSError as error:
            raise self._lost(place, error) from error

    def _lost(self, place: int, error: OSError) -> RuntimeError:
        rank = self.ranks[place]
        return RuntimeError(f"the connection to rank {rank} is lost: {error}")

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


def links_of(group: Any) -> Links:
    """Those among the ranks of `group`. Collective, for these ranks."""
    if group not in _links:
        ranks = dist.get_process_group_ranks(group)
        number = sum(each.ranks == ranks for each in _links.values())
        store = dist.PrefixStore(f"links {number} of {ranks}", default_store())
        place, timeout_s = dist.get_rank(group), timeout_of(group).total_seconds()
        made = connect(store, place, len(ranks), timeout_s)
        links = {place: Link(each) for place, each in made.items()}
        _links[group] = Links(ranks, place, links, timeout_s)
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
    """Exchanges so far, by their name and kind: equal on all ranks, where all is well;
    the number of an exchange is that of its kind."""
    found: dict[str, int] = {}
    for each in list(_links.values()):
        for apart in (False, True):
            name = name_of(each, apart=apart)
            found[name] = found.get(name, 0) + each.num_begun(apart=apart)
    return found


def name_of(links: Links, *, apart: bool) -> str:
    """By which the ranks know the exchanges of one kind."""
    return f"{links.name}{' apart' * apart}"


class Exchange:
    """Bytes that all ranks of a group have begun to give each other."""

    def __init__(self, group: Any, payload: bytes, *, apart: bool) -> None:
        """Collective."""
        self._payload = payload
        self._links = links_of(group)
        self._key = self._links.begin(payload, apart=apart)

    def wait(self) -> list[bytes]:
        """The bytes of each, in the order of their ranks. To be called once."""
        links = self._links
        if is_profiled():
            ranks = ",".join(map(str, links.ranks))
            with record_function(COMPARE_MARK.format(ranks)):
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
    found = {each.family: each.address for each in _addresses_of(interface)}
    for kind in (socket.AF_INET, socket.AF_INET6):
        if kind in found:
            return found[kind]
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    kind, *_, to = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as asked:
        asked.connect(to)  # sends nothing
        return str(asked.getsockname()[0])


def _addresses_of(interface: str) -> Sequence[Any]:
    return psutil.net_if_addrs().get(interface, [])
