"""The hosts that `--hosts` names: what each has, before anything is started there."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from labkit import timeouts
from labkit.checks import UserError
from labkit.checks import short_repr
from labkit.host.facts import MARK
from labkit.host.facts import HostFacts
from labkit.host.facts import address_of
from labkit.host.facts import own_address
from labkit.host.facts import versions
from labkit.notebook.hosts.launcher import HostLauncher
from labkit.notebook.hosts.launcher import HostSpec
from labkit.notebook.hosts.launcher import last_line
from labkit.notebook.hosts.launcher import written
from labkit.notebook.kernel import interrupts

_HOST = re.compile(r"((?P<user>\w[\w.-]*)@)?(?P<name>\w[\w.-]*)(:(?P<num>[^:]*))?")
_PASSED_ON = (
    *("PYTHON", "OMP_", "NCCL_", "GLOO_", "TORCH", "CUDA_"),
    *("LABKIT_RUNS", "LABKIT_DATA"),
)
"""Prefixes of variables that ranks on other hosts have as they are here."""


@dataclass(frozen=True)
class FoundHost:
    """A host that answers, and has what is here."""

    spec: HostSpec
    facts: HostFacts


@dataclass(frozen=True)
class Hosts:
    """The hosts of a lab, and where they find the notebook."""

    own_address: str
    found: tuple[FoundHost, ...]
    launcher: HostLauncher
    """What starts programs on them; to be closed when they are used no more."""
    patience_s: float = 0.0
    """For how long they keep a lab, at least, of whose controller they hear nothing."""


def parse_hosts(text: Any) -> list[HostSpec]:
    """The hosts that `--hosts` names; ValueError for what names none."""
    if not isinstance(text, str):
        raise ValueError(
            f"hosts is {short_repr(text)}; it names hosts and their ranks, for example "
            '"node1:2,node2:2"'
        )
    found: list[HostSpec] = []
    for each in text.split(","):
        match = _HOST.fullmatch(each.strip())
        if match is None:
            raise ValueError(
                f"--hosts {short_repr(text)}: {each.strip()!r} is not a host; write "
                "HOST:N,HOST:N, for example node1:2,node2:2. HOST is a name, an IPv4 "
                "address or user@name (a port goes into ~/.ssh/config)"
            )
        num = match["num"]
        if num is not None and not (num.isdecimal() and int(num)):
            raise ValueError(
                f"--hosts {short_repr(text)}: {num!r} ranks on {match['name']}; choose "
                "1 or more, as in node1:2"
            )
        name = each.strip().partition(":")[0]
        if name in [other.name for other in found]:
            raise ValueError(
                f"--hosts {short_repr(text)} names {name} twice; name it once, with "
                "all of its ranks"
            )
        found.append(HostSpec(name, None if num is None else int(num)))
    return found


def check_hosts(what: str, value: Any) -> None:
    """ValueError unless it names hosts."""
    parse_hosts(value)


def check_interface(what: str, value: Any) -> None:
    """ValueError unless this host has such a network interface."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {short_repr(value)}; it is a name, such as eth0")
    address_of(value)


def find_hosts(launcher: HostLauncher, *, interface: str | None, device: str) -> Hosts:
    """Ask every host of a launcher what it has. Nothing is started, or changed.

    UserError, which names the hosts, where one cannot be reached, or has another
    version of what has to be the same everywhere.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(name, "").removeprefix("=")
        if interface is None and value in psutil.net_if_addrs():
            interface = value
    here = address_of(interface) if interface else _address_towards(launcher)
    told = _ask(launcher, [here, interface or "", device])
    ours = versions()
    wrong = [
        f"{library} is {found['versions'].get(library, 'unknown')} on {name} and "
        f"{version} here"
        for name, found in told.items()
        for library, version in ours.items()
        if found["versions"].get(library) != version
    ]
    if wrong:
        raise UserError(
            "; ".join(wrong) + "; install the same versions on all hosts. Nothing was "
            "started"
        )
    facts = {name: HostFacts(**each) for name, each in told.items()}
    names: dict[str, str] = {}
    for name, each in facts.items():
        if (other := names.setdefault(each.address, name)) != name:
            raise UserError(
                f"{other} and {name} have the same address, {each.address}; name a "
                "host once, with all of its ranks. Nothing was started"
            )
    found = tuple(FoundHost(spec, facts[spec.name]) for spec in launcher.specs)
    return Hosts(here, found, launcher)


def _address_towards(launcher: HostLauncher) -> str:
    """The address of this host at which the others reach it."""
    found = {}
    for spec in launcher.specs:
        try:
            there = socket.gethostbyname(launcher.address(spec.name))
            found[spec.name] = own_address(there)
        except OSError as error:
            raise UserError(
                f"{spec.name} has no address that is known here ({error}): check how "
                "its name is spelled. If it is right, labkit cannot choose the network "
                "between that host and this one: name the network interface with "
                "--interface. Nothing was started"
            ) from error
    others = {each for each in found.values() if not each.startswith("127.")}
    if len(others) > 1:
        ways = ", ".join(f"{name} from {each}" for name, each in found.items())
        raise UserError(
            f"this host reaches the hosts by several networks ({ways}); name the one "
            "that all of them share with --interface. Nothing was started"
        )
    return next(iter(others), "127.0.0.1")


def program(module: str) -> list[str]:
    """The words that run one of labkit's modules on a host."""
    path = os.environ.get("PYTHONPATH")
    passed = [f"PYTHONPATH={path}"] if path else []
    return ["env", *passed, sys.executable, "-P", "-m", module]


def _ask(launcher: HostLauncher, arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The facts that each host says, by its name."""
    words = program("labkit.host.facts")
    with contextlib.ExitStack() as files:
        asked = {
            spec.name: _Question(launcher, spec.name, [*words, *arguments], files)
            for spec in launcher.specs
        }
        deadline = time.monotonic() + timeouts.SSH_S
        while any(each.code is None for each in asked.values()):
            interrupts.check()
            if time.monotonic() > deadline:
                break
            time.sleep(timeouts.POLL_S)
        found, wrong = {}, []
        for name, question in asked.items():
            line = re.search(rf"(?m){MARK} (.*)$", question.said())
            if question.code == 0 and line is not None:
                found[name] = json.loads(line[1])
            else:
                wrong.append(f"{name}: {question.why()}")
    if wrong:
        raise UserError("; ".join(wrong) + ". Nothing was started")
    return found


class _Question:
    """A program on a host under way."""

    def __init__(
        self,
        launcher: HostLauncher,
        name: str,
        words: Sequence[str],
        files: contextlib.ExitStack,
    ) -> None:
        """It is ended, where it has not yet, with `files`."""
        self._launcher = launcher
        self._host = name
        # What fills no pipe: nobody reads it meanwhile.
        self._said, self._errors = (
            files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            for _ in range(2)
        )
        self._process = subprocess.Popen(
            launcher.command(name, words),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._errors,
        )
        files.callback(self._end)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def said(self) -> str:
        """What it wrote to its output."""
        return written(self._said)

    def why(self) -> str:
        """Why it did not say what the host has."""
        errors = written(self._errors)
        last = last_line(errors)
        if self.code is None:
            said = f" ({last})" if last else ""
            return f"it has not answered within {timeouts.SSH_S:g} s{said}"
        if re.search(r"(?m)No module named '?labkit|^env: ", errors):
            return (
                f"labkit cannot be imported with {sys.executable} there ({last}); "
                "install the same environment at the same path"
            )
        return (
            self._launcher.cannot_reach(self._host, self.code, errors)
            or last
            or f"Python there ended with exit code {self.code}"
        )


def passed_on() -> dict[str, str]:
    """The variables of this process that ranks on other hosts have too."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and name != "CUDA_VISIBLE_DEVICES"
    }
