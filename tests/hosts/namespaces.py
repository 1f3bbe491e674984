"""Hosts for tests: network namespaces on a bridge, with an address and an sshd each.

They share this machine's files and process ids, and nothing of its network: what is
meant for another host and asks for this one's loopback finds nothing there.

`python tests/hosts/namespaces.py COMMAND ...` runs a command beside two of them, which
it reaches as node1 and node2 over a link of 1 Gbit/s.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

LIMIT_S = 60
"""By then nothing is left on a host."""
BRIDGE = "labkit0"
SUBNET = "10.213.77"
"""The first three numbers of all addresses; the last one of this host's is 254."""
PRIVATE = "private"
"""In the folder of the test: what is in it on one host is not there on another."""
_PORT = 22
_DISK_BYTES = 32 * 2**20
_WIRE = str(Path(__file__).with_name("wire.py"))
_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host-key
PidFile none
AuthorizedKeysFile {folder}/user-key.pub
PasswordAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
AcceptEnv LABKIT_TEST
{more}
"""
_CLIENT = """\
Host {name} {alias} {address}
  HostName {address}
  IdentityFile {folder}/user-key
  UserKnownHostsFile {folder}/known-hosts
  IdentitiesOnly yes
"""


def why_not() -> str:
    """Why there can be no such hosts here; "" where they can."""
    if os.geteuid():
        return "network namespaces take root"
    for program in ("ip", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"there is no {program}: apt-get install openssh-server iproute2"
    if not Path("/usr/sbin/sshd").exists():
        return "there is no sshd: apt-get install openssh-server"
    done = _try("ip", "netns", "add", "labkit-try")
    if done.returncode:
        return f"network namespaces cannot be made here: {done.stderr.strip()}"
    _try("ip", "netns", "delete", "labkit-try")
    return ""


@dataclass
class Namespace:
    """One host."""

    name: str
    address: str
    sshd: subprocess.Popen[bytes]
    wire: "subprocess.Popen[str] | None" = None
    """What its packets pass, where `set_wire` is to make trouble."""

    def processes(self) -> list[psutil.Process]:
        """What runs on it, besides sshd that listens."""
        told = _run("ip", "netns", "pids", self.name).split()
        own = [self.sshd.pid, *([self.wire.pid] if self.wire else [])]
        found = []
        for pid in map(int, told):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if pid not in own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def programs(self) -> list[str]:
        """The command lines of those."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
        return found

    def place(self, folder: Path) -> Path:
        """Where a folder is as it is there."""
        return Path(f"/proc/{self.sshd.pid}/root", *folder.parts[1:])

    def files(self, folder: Path, pattern: str) -> list[Path]:
        """What is in a folder as it is there."""
        return [*self.place(folder).glob(pattern)]

    def end_sessions(self) -> None:
        """End what sshd has of connections that broke: it would find out in minutes."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.name() == "sshd":
                    process.kill()

    def die(self) -> None:
        """All at once: nothing on it answers any more, or says good-bye."""
        self.set_link("down")
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def set_wire(
        self, *, loss: float = 0, delay_s: float = 0, bytes_per_s: float | None = None
    ) -> None:
        """What its packets suffer from now on, both ways; nothing by default."""
        assert self.wire is not None
        assert self.wire.stdin is not None
        told = {"loss": loss, "delay_s": delay_s, "bytes_per_s": bytes_per_s}
        self.wire.stdin.write(json.dumps(told) + "\n")
        self.wire.stdin.flush()

    def set_link(self, state: str) -> None:
        """Connect it ("up") or cut it off ("down")."""
        _run("ip", "link", "set", f"lk-{self.name}", state)
        if state == "down":
            return
        until = time.monotonic() + LIMIT_S
        while True:  # for a moment the way there is still known as one that fails
            try:
                socket.create_connection((self.address, _PORT), 1).close()
                return
            except OSError:
                assert time.monotonic() < until, f"{self.name} is not reached"
                time.sleep(0.1)

    def throttle(self, rate: str) -> None:
        """What it sends to others goes at this rate, as "1gbit"."""
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
        within = ("ip", "netns", "exec", self.name)
        _run(*within, "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def listening(self) -> list[str]:
        """The TCP ports that are open on it, but for sshd's."""
        told = _run("ip", "netns", "exec", self.name, "ss", "-Htln")
        addresses = [line.split()[3] for line in told.splitlines()]
        return [each for each in addresses if each != f"{self.address}:{_PORT}"]


@contextlib.contextmanager
def hosts(folder: Path, num_hosts: int) -> Iterator[list[Namespace]]:
    """Hosts named lk1, lk2, ..., which `ssh` reaches by the program of that name in
    `folder / "bin"`, also as node1, node2, ... The last one has a wire."""
    names = [f"lk{number}" for number in range(1, num_hosts + 1)]
    for key in ("host-key", "user-key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # for sshd, on Debian
    made: list[Namespace] = []
    _remove(names)
    try:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(names, 1):
            made.append(_make(folder, name, number, has_wire=name == names[-1]))
        key = (folder / "host-key.pub").read_text()
        (folder / "known-hosts").write_text("".join(f"{e.address} {key}" for e in made))
        config = folder / "ssh-config"
        config.write_text(
            "".join(
                _CLIENT.format(folder=folder, alias=f"node{number}", **vars(each))
                for number, each in enumerate(made, 1)
            )
        )
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
        ssh.chmod(0o755)
        yield made
    finally:
        for each in made:
            for process in [*each.processes(), psutil.Process(each.sshd.pid)]:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            each.sshd.wait()
            if each.wire is not None:
                each.wire.communicate()  # its stdin ends
        _remove(names)


def _make(folder: Path, name: str, number: int, *, has_wire: bool) -> Namespace:
    address = f"{SUBNET}.{number}"
    within = ("ip", "netns", "exec", name)
    _run("ip", "netns", "add", name)
    wire = None
    if has_wire:
        wire = subprocess.Popen(
            [sys.executable, _WIRE, name, f"lk-{name}", "eth0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert wire.stdout is not None
        assert wire.stdout.readline() == "ready\n"
    else:
        _run("ip", "link", "add", f"lk-{name}", "type", "veth", "peer", f"in-{name}")
        _run("ip", "link", "set", f"in-{name}", "netns", name, "name", "eth0")
    _run("ip", "link", "set", f"lk-{name}", "master", BRIDGE, "up")
    _run(*within, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    _run(*within, "ip", "link", "set", "lo", "up")
    _run(*within, "ip", "link", "set", "eth0", "up")
    config = folder / f"sshd-{name}"
    private = folder / PRIVATE
    more = f"SetEnv TMPDIR={private}" if has_wire else ""
    config.write_text(
        _CONFIG.format(port=_PORT, address=address, folder=folder, more=more)
    )
    # In a mount namespace of its own, which `ip netns exec` makes.
    private.mkdir(exist_ok=True)
    script = (
        f"mount -t tmpfs -o size={_DISK_BYTES} none {private} && "
        f"exec /usr/sbin/sshd -D -e -f {config}"
    )
    sshd = subprocess.Popen(
        [*within, "sh", "-c", script],
        stderr=(folder / f"sshd-{name}.log").open("wb"),
    )
    listens = f"{address}:{_PORT}"
    until = time.monotonic() + 10
    while listens not in _run(*within, "ss", "-Htln"):
        assert sshd.poll() is None, (folder / f"sshd-{name}.log").read_text()
        assert time.monotonic() < until, "sshd does not listen"
        time.sleep(0.05)
    return Namespace(name, address, sshd, wire)


def _remove(names: list[str]) -> None:
    for name in names:
        _try("ip", "netns", "delete", name)
        _try("ip", "link", "delete", f"lk-{name}")
    _try("ip", "link", "delete", BRIDGE)


def _try(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run(*command: str) -> str:
    done = _try(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as place, hosts(Path(place), 3) as found:
        for host in found[:2]:
            host.throttle("1gbit")
        path = os.pathsep.join([f"{place}/bin", os.environ["PATH"]])
        done = subprocess.run(
            sys.argv[1:], env={**os.environ, "PATH": path}, check=False
        )
    sys.exit(done.returncode)
