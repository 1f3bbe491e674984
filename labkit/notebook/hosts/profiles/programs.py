"""Programs on this host, for a process on another: called on an engine of a profile."""

import itertools
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence

from ipyparallel.util import disambiguate_ip_address

from labkit.host.facts import own_address

_OF_THE_ENGINE = "IPP_"
"""Prefix of the variables that say of what cluster this engine is."""

_programs: dict[int, "_Program"] = {}
_numbers = itertools.count(1)


class _Program:
    """One under way, whose output is kept in files, so that no pipe fills."""

    def __init__(self, words: Sequence[str], given: str) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self._read = [0, 0]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_OF_THE_ENGINE)
        }
        with tempfile.TemporaryFile() as told:
            told.write(given.encode())
            told.seek(0)
            self._process = subprocess.Popen(
                words,
                stdin=told,
                stdout=self._files[0],
                stderr=self._files[1],
                env=environment,
            )

    def read(self) -> tuple[str, str, int | None]:
        """What it has written since this was called last, to its output and as errors,
        and its exit code; None while it runs."""
        code = self._process.poll()  # first: what it wrote before its end is read
        said = []
        for which, file in enumerate(self._files):
            written = os.pread(file.fileno(), 2**20, self._read[which])
            self._read[which] += len(written)
            said.append(written.decode(errors="replace"))
        return said[0], said[1], code

    def close(self) -> None:
        """End it, if it has not ended, and forget what it wrote."""
        self._process.terminate()
        self._process.wait()
        for file in self._files:
            file.close()


def whereabouts(interface: str, location: str) -> tuple[str, str]:
    """The name of this host, and its address on the way to the controller, which
    listens at `interface` on the host at `location`."""
    address = disambiguate_ip_address(interface.removeprefix("tcp://"), location)
    return socket.gethostname(), own_address(address)


def begin(words: Sequence[str], given: str) -> int:
    """Start a program with `given` as its input; the number by which it is known."""
    number = next(_numbers)
    _programs[number] = _Program(words, given)
    return number


def read(number: int) -> tuple[str, str, int | None]:
    """As `_Program.read`; one that has ended is forgotten with it."""
    said = _programs[number].read()
    if said[2] is not None and not said[0] and not said[1]:
        _programs.pop(number).close()
    return said


def end(number: int) -> None:
    """End a program, and forget it."""
    _programs.pop(number).close()
