"""What starts programs on hosts, and says why they are gone."""

import abc
import contextlib
import copy
import os
import re
import subprocess
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO
from typing import Any

from labkit import timeouts
from labkit.checks import UserError

ANOTHER_LAB = "%dist_stop, then %dist_start, starts another lab"


@dataclass(frozen=True)
class HostSpec:
    """One host, and how many ranks it is to have."""

    name: str
    """As the launcher takes it."""
    num_ranks: int | None
    """None for one rank for each GPU."""


class HostLauncher(abc.ABC):
    """Starts programs on hosts: that of a `--launcher`."""

    ends_with_program = True
    """Whether a command line that has ended says that the program has."""

    def __init__(self, specs: Sequence[HostSpec]) -> None:
        self.specs = list(specs)

    def on_hosts(self, specs: Sequence[HostSpec]) -> "HostLauncher":
        """The same for other hosts. ValueError where it is not for any."""
        other = copy.copy(self)
        other.specs = list(specs)
        return other

    def for_ranks(self, num_ranks: int, now: Mapping[str, int]) -> "HostLauncher":
        """The same for so many ranks, where hosts have so many `now`. ValueError where
        it cannot have them, or does not say where."""
        each, more = divmod(num_ranks, len(now))
        even = {name: each + (place < more) for place, name in enumerate(now)}
        there, example = (
            ",".join(f"{name}:{number}" for name, number in hosts.items() if number)
            for hosts in (now, even)
        )
        raise ValueError(
            f"-n {num_ranks}: the lab is on {there}; say how many ranks each host is "
            f"to have, as in %dist_restart --hosts {example}"
        )

    @abc.abstractmethod
    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """The command line that runs a program on a host, and ends when that does."""

    @abc.abstractmethod
    def address(self, host: str) -> str:
        """An address or a name that the resolver of this host knows."""

    @abc.abstractmethod
    def cannot_reach(self, host: str, code: int, errors: str) -> str:
        """Why a program was not started, from the exit code of the command line and
        what it wrote to stderr; "" where it was, and failed by itself."""

    def check(self) -> None:
        """UserError where nothing can be started on the hosts any more."""
        if why := self.why_gone():
            raise UserError(f"{why}; {ANOTHER_LAB}")

    def why_gone(self, said: str = "") -> str:
        """Why all hosts are gone at once; "" where they are not, as far as is known.
        `said` is what a command line printed that has ended."""
        return ""

    @property
    def ends_at(self) -> float | None:
        """When all hosts are taken back, in seconds since the epoch; None where nothing
        limits the time."""
        return None

    def close(self) -> None:  # noqa: B027
        """Give back what was taken to use the hosts."""


def check_spread(num_ranks: int, num_hosts: int) -> None:
    """ValueError for fewer ranks than hosts."""
    if num_ranks < num_hosts:
        raise ValueError(
            f"-n {num_ranks} --nodes {num_hosts}: fewer ranks than hosts; use "
            f"--nodes {num_ranks} at most"
        )


def spread(num_ranks: int, names: Sequence[str]) -> list[HostSpec]:
    """So many ranks, at least one a host, evenly over hosts: more on the first."""
    least, more = divmod(num_ranks, len(names))
    return [
        HostSpec(name, least + (number < more)) for number, name in enumerate(names)
    ]


def fewer(num_ranks: int, now: Mapping[str, int]) -> list[HostSpec]:
    """The ranks of each host where those of the last hosts leave first."""
    specs, left = [], num_ranks
    for name, number in now.items():
        if left:
            specs.append(HostSpec(name, min(number, left)))
            left -= min(number, left)
    return specs


def has_let_go(holder: "subprocess.Popen[str]") -> bool:
    """Tell what holds a job to end it, and itself; whether it has, after a while."""
    assert holder.stdin is not None
    # A child that this process forked has the pipe too: its end would tell nothing.
    with contextlib.suppress(OSError):  # it is gone
        holder.stdin.write("\n")
        holder.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        holder.wait(timeouts.END_JOB_S)
        return True
    return False


def written(file: IO[Any]) -> str:
    """What a process has written to a file that it shares with this one: to read it
    as a file would move where that process writes."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def output_of(command: Sequence[str]) -> str:
    """What a short command prints; UserError, with its last line, where it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=timeouts.ANSWER_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{error}") from error
    if done.returncode:
        last = last_line(done.stderr)
        raise UserError(f"{command[0]} failed: {last or f'exit {done.returncode}'}")
    return done.stdout


def last_lines(text: str) -> list[str]:
    """The last three lines with a letter in them: Open MPI frames its errors in
    dashes, and Grid Engine ends them with "Exiting."."""
    return [line.strip() for line in text.splitlines() if re.search(r"\w", line)][-3:]


def last_line(text: str) -> str:
    """The last one of these."""
    return "".join(last_lines(text)[-1:])
