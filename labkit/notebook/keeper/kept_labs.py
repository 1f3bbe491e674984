"""The labs that are kept on this host: published, found and described."""

import contextlib
import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from labkit import timeouts
from labkit.checks import UserError
from labkit.checks import short_repr
from labkit.host.facts import versions
from labkit.json_files import parse
from labkit.json_files import read_json
from labkit.key_server import Meeting
from labkit.notebook.cluster.placement import in_words
from labkit.notebook.keeper.lines import Lines
from labkit.records import Placement

_FILE = "kept.json"
_SOCKET = "keeper"
_HOW = (
    "%dist_start --keep starts a lab that outlives its kernel, for %dist_attach in the "
    "next one: on the same host, as the same user and with the same $TMPDIR"
)


@dataclass(frozen=True)
class KeptLab:
    """What is known of a lab by a file in its folder."""

    name: str
    keeper: int
    """The process id of its keeper."""
    versions: dict[str, str]
    """As of `labkit.host.facts.versions`."""
    launcher: str
    placements: list[Placement]
    began: float
    """In seconds since the epoch."""
    keep_minutes: float


@dataclass(frozen=True)
class Situation:
    """What the keeper of a lab says of it."""

    kernel: int | None
    """The process id of the kernel that is attached; None without one."""
    since: float
    """When that came, or the last one went: in seconds since the epoch."""

    def describe(self, lab: KeptLab) -> str:
        """As "lab-123: 2 ranks on the CPU, gloo, since 12:01; ..."."""
        said = f"{lab.name}: {in_words(lab.placements)}, started {clock(lab.began)}; "
        if self.kernel is not None:
            return f"{said}kernel {self.kernel} is attached to it"
        ends = self.since + 60 * lab.keep_minutes
        idle = max(time.time() - self.since, 0) / 60
        return f"{said}without a kernel for {idle:.0f} min, ends {clock(ends)}"


def clock(when: float) -> str:
    """A time for reading: with the day where that is another one."""
    then = time.localtime(when)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime("at %H:%M" if is_today else "on %Y-%m-%d at %H:%M", then)


def since(when: float) -> str:
    """As "since 16:52", or "since 2026-11-25 at 16:52"."""
    return f"since {clock(when).removeprefix('at ').removeprefix('on ')}"


def place(folder: Path) -> Meeting:
    """Where the keeper of the lab with this folder listens."""
    return Meeting(str(folder / _SOCKET))


def publish(folder: Path, lab: KeptLab) -> None:
    """Let kernels of this user find a lab, whose keeper listens at its `place`."""
    path = folder / f"new-{_FILE}"
    path.touch(0o600)
    path.write_text(json.dumps(asdict(lab)))
    path.replace(folder / _FILE)  # others may look meanwhile


def why_unsafe(folder: Path) -> str:
    """Why a folder is not to be trusted; "" where only this user can change it."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if found.st_uid != os.getuid():
        return f"{folder} belongs to user {found.st_uid} and not to {os.getuid()}"
    if mode := stat.S_IMODE(found.st_mode) & 0o077:
        mode |= 0o700
        return f"{folder} has mode {mode:o} and not 700: others may have changed it"
    return ""


def _roots() -> set[Path]:
    """Where `tempfile` makes folders, also where one is full by now: it tries whether
    it can write."""
    told = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    return {Path(each).resolve() for each in [*told, "/tmp"] if each}


def find_labs() -> tuple[list[tuple[Path, KeptLab]], list[str]]:
    """The labs of this user that are kept here, by their folders, the oldest first; and
    what is wrong with others."""
    found, wrong = [], []
    for folder in chain.from_iterable(each.glob("labkit-*") for each in _roots()):
        try:
            if not (folder / _FILE).exists():
                continue
            if why := why_unsafe(folder):
                wrong.append(why)
            else:
                found.append((folder, parse(KeptLab, read_json(folder / _FILE))))
        except OSError:  # another user's; or it ends in this moment
            continue
        except (TypeError, ValueError) as error:
            wrong.append(f"{folder / _FILE} describes no lab: {error}")
    return sorted(found, key=lambda each: each[1].began), wrong


def situation(folder: Path) -> Situation:
    """What the keeper of a lab says of it; OSError where there is none any more, or
    none that answers."""
    connection = place(folder).connect()
    connection.settimeout(timeouts.ANSWER_S)  # it may be stopped
    lines = Lines(connection)
    try:
        lines.send({"id": 0, "question": "situation", "arguments": {}})
        for message in lines:
            return Situation(**message["answer"])
        raise ConnectionError("the keeper has ended")
    finally:
        lines.close()


def living(
    labs: Sequence[tuple[Path, KeptLab]],
) -> list[tuple[Path, KeptLab, Situation]]:
    """Those of `labs` that have a keeper, and what it says."""
    alive = []
    # It was ended, or is stopped, or the host has been down; or it is of another
    # version, which says other things.
    gone = contextlib.suppress(OSError, KeyError, TypeError)
    for folder, lab in labs:
        with gone:
            alive.append((folder, lab, situation(folder)))
    return alive


def waiting_labs() -> list[str]:
    """The kept labs without a kernel, in words."""
    return [
        now.describe(lab)
        for _, lab, now in living(find_labs()[0])
        if now.kernel is None
    ]


def choose(name: str | None) -> tuple[Path, KeptLab]:
    """The kept lab of that name, or the only one; UserError where there is none such,
    or this kernel cannot work with it."""
    labs, wrong = find_labs()
    alive = living(labs)
    told = [now.describe(lab) for _, lab, now in alive]
    if name is not None:
        alive = [each for each in alive if each[1].name == name]
    if not alive:
        what = "lab" if name is None else f"lab {short_repr(name)}"
        there = f"; there are: {_list(told)}" if told else f"; {_HOW}"
        refused = "".join(f"; refused: {each}" for each in wrong)
        raise UserError(f"no {what} is kept on this host{there}{refused}")
    if len(alive) > 1:
        raise UserError(
            f"{len(alive)} labs are kept on this host; %dist_attach NAME chooses one: "
            + _list(told)
        )
    [(folder, lab, now)] = alive
    if now.kernel is not None:
        raise UserError(
            f"kernel {now.kernel} has been attached to {lab.name} {since(now.since)}. "
            "Shut that kernel down first: the lab stays as it is"
        )
    check_versions(lab)
    return folder, lab


def check_versions(lab: KeptLab) -> None:
    """UserError unless this kernel has the versions that the lab was started with."""
    here = versions()
    wrong = [
        f"{library} {lab.versions.get(library, 'unknown')} there and {version} here"
        for library, version in here.items()
        if lab.versions.get(library) != version
    ]
    if wrong:
        raise UserError(
            f"{lab.name} was started with other versions: {', '.join(wrong)}; attach "
            f"with a kernel that has the same, or end the lab: kill {lab.keeper}"
        )


def _list(told: Sequence[str]) -> str:
    return "".join(f"\n  {each}" for each in told)
