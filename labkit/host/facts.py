"""What is to be known of a host before a lab starts there.

`python -m labkit.host.facts ADDRESS INTERFACE DEVICE` prints it as JSON. It imports
neither torch nor ipyparallel.
"""

import json
import os
import platform
import socket
import sys
from dataclasses import asdict
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from labkit.checks import UserError
from labkit.control_groups import memory_total
from labkit.host.devices import count_gpus
from labkit.host.devices import num_cores

MARK = "labkit-facts:"
"""What the line of facts begins with; a login may print others."""
COMPARED = ("labkit", "torch", "deepspeed", "ipyparallel", "ipykernel")
"""What has to be of one version on all hosts."""


@dataclass(frozen=True)
class HostFacts:
    """What a host says of itself."""

    versions: dict[str, str]
    """Of Python and of what is compared."""
    num_gpus: int
    num_cores: int
    memory_bytes: int
    address: str
    """At which others reach it."""
    interface: str
    """The network interface that has this address."""
    folder: str
    """In which files may be made for a while."""


def versions() -> dict[str, str]:
    """What has to be the same on all hosts."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in COMPARED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def own_address(towards: str) -> str:
    """The address of this host on the way to another address; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        address: str = probe.getsockname()[0]
    return address


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface; ValueError where there is none."""
    found = psutil.net_if_addrs()
    for each in found.get(interface, ()):
        if each.family is socket.AF_INET:
            return each.address
    raise ValueError(
        f"no network interface {interface!r} with an IPv4 address; those with one: "
        + ", ".join(
            name
            for name, addresses in found.items()
            if any(each.family is socket.AF_INET for each in addresses)
        )
    )


def interface_of(address: str) -> str:
    """The name of the network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise ValueError(f"no network interface has the address {address}")


def _writable_folder() -> str:
    for each in (os.environ.get("TMPDIR", ""), "/tmp", str(Path.home())):
        if each and os.access(each, os.W_OK):
            return each
    raise UserError(
        "no folder for temporary files can be written to: TMPDIR, /tmp and the home "
        "folder were tried; set TMPDIR"
    )


def read_facts(towards: str, interface: str | None, device: str) -> HostFacts:
    """The facts of this host, as seen on the way to the address of another."""
    address = address_of(interface) if interface else own_address(towards)
    return HostFacts(
        versions=versions(),
        num_gpus=0 if device == "cpu" else count_gpus(),
        num_cores=num_cores(),
        memory_bytes=memory_total(),
        address=address,
        interface=interface_of(address),
        folder=_writable_folder(),
    )


if __name__ == "__main__":
    try:
        facts = read_facts(sys.argv[1], sys.argv[2] or None, sys.argv[3])
    except (ValueError, OSError, UserError) as error:
        sys.exit(f"{error}")
    print(MARK, json.dumps(asdict(facts)))
