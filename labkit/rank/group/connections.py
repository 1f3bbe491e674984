"""This process's TCP sockets: shutting them frees what waits in a collective."""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

Address = tuple[str, int]
"""The last four bytes of an IP address, in one notation for all, and the port: gloo
reaches an IPv4 address over IPv6 as well."""

_ESTABLISHED = "01"
"""The state of a connection in /proc/net/tcp. Source: proc_net_tcp in Linux's
documentation."""


@dataclass(frozen=True)
class Connection:
    """One end of an established TCP connection."""

    fd: int
    local: Address
    remote: Address


def close_connections(peers: Collection[int], hosts: Collection[str] = ()) -> None:
    """Shut this process's TCP connections to the processes `peers`, and to the
    addresses `hosts` of others, but for those to the notebook; and no others.

    Those are gloo's. A peer leads a session: what it has forked, as a DataLoader's
    worker, has its connections too, and keeps them open when it has died.
    """
    own = os.getpid()
    others = set(peers) - {own}
    found = connections_of({own, *others, *members_of(others)})
    theirs = {
        each.local
        for pid, connections in found.items()
        for each in connections
        if pid != own
    }
    addresses = {_number(each) for each in hosts}
    kept = controller_ports() if hosts else set()
    for each in found[own]:
        is_elsewhere = each.remote[0] in addresses and each.remote[1] not in kept
        if each.remote in theirs or is_elsewhere:
            _shut(each.fd, socket.socket.getpeername, each.remote[1])


def _number(ip: str) -> str:
    """An IPv4 address in the notation of `Address`."""
    if sys.platform != "linux":
        return ip
    return f"{int.from_bytes(socket.inet_aton(ip), sys.byteorder):08X}"


def controller_ports() -> set[int]:
    """The ports of ipyparallel's controller, which may be on a host of other ranks."""
    told = json.loads(os.environ.get("IPP_CONNECTION_INFO", "{}"))
    values = [each for value in told.values() for each in _as_list(value)]
    return {each for each in values if isinstance(each, int)}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def members_of(sessions: Collection[int]) -> Iterator[int]:
    """The processes that are in these sessions."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended just now
            if os.getsid(pid) in sessions:
                yield pid


def connections_of(pids: Iterable[int]) -> dict[int, list[Connection]]:
    """The established TCP connections of processes, by process id.

    psutil reads the table of all of the host's connections once for each process: with
    N ranks it has N^2 rows, and every rank looks at N processes.
    """
    if sys.platform != "linux":
        return {pid: list(_by_psutil(pid)) for pid in pids}
    table = _established()
    return {
        pid: [
            Connection(fd, *table[inode])
            for fd, inode in _sockets(pid)
            if inode in table
        ]
        for pid in pids
    }


def _established() -> dict[str, tuple[Address, Address]]:
    """Local and remote address by the number of the socket's inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines():
                fields = line.split(maxsplit=10)
                if fields[3] == _ESTABLISHED:
                    found[fields[9]] = _address(fields[1]), _address(fields[2])
    return found


def _address(text: str) -> Address:
    """Of an address as /proc/net/tcp has it: "0100007F:1F90"."""
    ip, port = text.split(":")
    return ip[-8:], int(port, 16)


def _sockets(pid: int) -> Iterator[tuple[int, str]]:
    """Descriptor and inode of each socket of a process; none once it has ended."""
    folder = f"/proc/{pid}/fd/"
    try:
        names = os.listdir(folder)  # noqa: PTH208 (of N ranks, N^2 are read)
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(folder + name)  # noqa: PTH115 (Path takes ten times)
        except OSError:  # closed just now
            continue
        if target.startswith("socket:["):
            yield int(name), target[8:-1]


def _by_psutil(pid: int) -> Iterator[Connection]:
    with contextlib.suppress(psutil.Error):
        for each in psutil.Process(pid).net_connections("tcp"):
            if each.status == psutil.CONN_ESTABLISHED:
                ends = [
                    (end.ip.removeprefix("::ffff:"), end.port)
                    for end in (each.laddr, each.raddr)
                ]
                yield Connection(each.fd, *ends)


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    return {each.laddr.port for each in _listeners()}


def close_listeners(kept: Collection[int]) -> None:
    """Have what waits for connections in this process fail, except on ports `kept`."""
    for each in _listeners():
        if each.laddr.port not in kept:
            _shut(each.fd, socket.socket.getsockname, each.laddr.port)


def _listeners() -> list[Any]:
    try:
        found = psutil.Process().net_connections("tcp")
    except psutil.Error:
        return []
    return [each for each in found if each.status == psutil.CONN_LISTEN]


def _shut(fd: int, address: Callable[[socket.socket], Any], port: int) -> None:
    """Shut a connection, if the descriptor is still of the one with this port."""
    # The peer may close its end, and with it ours, at this very moment.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
        if address(duplicate)[1] == port:
            duplicate.shutdown(socket.SHUT_RDWR)
