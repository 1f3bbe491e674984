"""Asks ranks where they are, and formats the answers."""

import contextlib
import html
import re
import shutil
import time
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from labkit import timeouts
from labkit.notebook.cluster.reach import Engines
from labkit.rank_spec import format_ranks
from labkit.records import COMPARISON
from labkit.records import Call
from labkit.records import Frame
from labkit.records import Position
from labkit.records import format_bytes
from labkit.records import shorten

# A collective of these has the same size on all ranks of its group.
_SAME_SIZE = ("all_reduce", "broadcast", "reduce")

_OF_LIBRARY = re.compile(r"^<|[/\\](site-packages|lib[/\\]python3\.\d+)[/\\]")
"""Files of a rank's libraries, and of Python's own; its host may be another one."""

_COMPARES = "waits to compare with other ranks what the loop does"

SHARED_MEMORY = "/dev/shm"
SCARCE_BYTES = 2**26
"""All that Docker gives a container, unless it is asked for more."""


class Stacks:
    """Where every rank is, in rank order; displays itself as text and as HTML.

    Attributes
    ----------
    positions : list of Position
        Of the ranks that answered: stack, collective and whether the cell runs.
    absent : dict
        Why the others did not, or why an answer may be outdated, by rank.
    mismatches : list of str
        Where ranks wait in different collectives.
    """

    def __init__(
        self,
        positions: Sequence[Position],
        absent: Mapping[int, str],
        *,
        is_full: bool = False,
        is_local: bool = True,
    ) -> None:
        self._is_local = is_local
        self.positions = sorted(positions, key=lambda each: each.rank)
        self.absent = dict(absent)
        self.mismatches = mismatched_collectives(self.positions)
        self.is_full = is_full

    def lines(self, in_cell: int | None = None) -> list[str]:
        """Summarize the stacks: one line for all ranks at the same place.

        Parameters
        ----------
        in_cell : int, optional
            The number of the cell that runs, which is then left out of the lines.

        Returns
        -------
        list of str
            Then lines that say where ranks wait in different collectives.
        """
        heads = [head for head, _ in self._blocks(is_brief=True)]
        if in_cell is not None:
            heads = [head.replace(f"Cell In[{in_cell}], ", "") for head in heads]
        memory = shared_memory_lines(self.positions) if self._is_local else []
        return heads + self.mismatches + memory

    def _blocks(self, *, is_brief: bool = False) -> Iterable[tuple[str, list[str]]]:
        """Where ranks stand in a line, and unless `is_brief` their stack."""
        by_rank = {each.rank: each for each in self.positions}
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted({*by_rank, *self.absent}):
            found = by_rank.get(rank)
            stack = [] if is_brief or found is None else self._stack_lines(found)
            alike.setdefault((self._where(rank, found), *stack), []).append(rank)
        for (where, *stack), ranks in alike.items():
            yield f"{format_ranks(ranks)}: {where}", stack

    def _where(self, rank: int, position: Position | None) -> str:
        is_any_running = any(each.is_running for each in self.positions)
        if position is None:
            return self.absent[rank]
        if not position.is_running:
            return "not in the cell" if is_any_running else "idle"
        parts = [self.absent.get(rank, ""), _place(position)]
        return ", ".join(filter(None, parts))

    def _stack_lines(self, position: Position) -> list[str]:
        if not position.is_running:
            return []
        lines = _format_stack(position.frames, is_full=self.is_full)
        for name, frames in position.others.items() if self.is_full else ():
            lines += [f"thread {name}:", *_format_stack(frames, is_full=True)]
        return lines

    def __repr__(self) -> str:
        parts = [
            "\n".join([head, *("    " + line for line in stack)])
            for head, stack in self._blocks()
        ]
        return "\n".join([*parts, *self.mismatches])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'><b>{html.escape(head)}</b>"
            f"<pre style='margin:0'>{html.escape(chr(10).join(lines))}</pre></td></tr>"
            for head, lines in self._blocks()
        )
        rest = "".join(f"<div>{html.escape(line)}</div>" for line in self.mismatches)
        return f"<table>{rows}</table>{rest}"


class StackRequest:
    """The question to ranks where they are, under way."""

    def __init__(
        self,
        cluster: Engines,
        ranks: Iterable[int],
        *,
        is_full: bool = False,
        is_second: bool = False,
    ) -> None:
        self._cluster = cluster
        self._is_full = is_full
        self._is_second = is_second
        self._asked_at = time.monotonic()
        self._answers: dict[int, Future[Any]] = {
            rank: cluster.ask(rank, "stack") for rank in ranks
        }
        self._silent: list[int] = []
        self._dumped_at: float | None = None

    def is_complete(self) -> bool:
        """Whether all has been said that will be; does not wait."""
        now = time.monotonic()
        if self._dumped_at is not None:
            return now - self._dumped_at > timeouts.DUMP_S
        silent = [rank for rank, answer in self._answers.items() if not answer.done()]
        if not silent:
            return True
        if now - self._asked_at < timeouts.STACK_S:
            return False
        self._silent, self._dumped_at = silent, now
        for rank in silent:
            self._cluster.engine(rank).ask_for_dump()
        return False

    def wait(self) -> Stacks:
        """What the ranks have said, once that is all."""
        while not self.is_complete():
            time.sleep(timeouts.QUICK_POLL_S)
        found = self.result()
        if found.mismatches and not self._is_second:
            # Ranks are not asked at the same instant: what is so still is so.
            again = StackRequest(
                self._cluster, self._answers, is_full=self._is_full, is_second=True
            ).wait()
            again.mismatches = [
                each for each in again.mismatches if each in found.mismatches
            ]
            return again
        return found

    def result(self) -> Stacks:
        """What the ranks have said."""
        positions, absent = [], {}
        for rank, answer in self._answers.items():
            if answer.cancelled() or not self._cluster.is_alive(rank):
                absent[rank] = "dead; %dist_restart brings it back"
            elif rank in self._silent:
                engine = self._cluster.engine(rank)
                absent[rank] = "does not answer: " + engine.stall_reason()
                if frames := read_dump(engine.dumped_stack()):
                    positions.append(Position(rank, frames=frames))
            elif (error := answer.exception()) is not None:
                absent[rank] = f"did not report where it is: {error}"
            else:
                found = Position.from_message(answer.result())
                positions.append(replace(found, rank=rank))  # in a part, another
        return Stacks(
            positions, absent, is_full=self._is_full, is_local=self._cluster.is_local
        )


def read_dump(text: str) -> list[Frame]:
    """The frames that Python's faulthandler wrote, from the cell inwards."""
    found = re.findall(r'File "(.*)", line (\d+) in (.*)', text)
    frames: list[Frame] = []
    for file, line, function in found:
        # Only the rank knows its cells' numbers; ipykernel compiles them as these.
        is_cell = re.search(r"ipykernel_\d+[/\\]", file) is not None
        place = f"a cell, line {line}" if is_cell else f"{file}:{line}"
        is_users = is_cell or not _OF_LIBRARY.search(file)
        frames.append(Frame(place, function, is_users=is_users))
    cells = [at for at, frame in enumerate(frames) if frame.place.startswith("a cell,")]
    return frames[: cells[-1] + 1 if cells else None][::-1]


def mismatched_collectives(positions: Sequence[Position]) -> list[str]:
    """Where ranks wait for what others will not do, a line each."""
    running = [each for each in positions if each.is_running]
    calls = {each.rank: each.call for each in running if each.call is not None}
    lines: list[str] = []
    for here in _by_group(calls):
        if _differ(here.values()):
            lines.append("the ranks do not agree: " + _format_calls(here))
        lines += _missing_from(here, positions, are_running=True)
        lines += _missing_from(here, positions, are_running=False)
    pairs = {call.kind.split()[0] for call in calls.values()} <= {"send", "recv"}
    is_any_free = len(calls) < len(running)
    if not lines and not pairs and not is_any_free and _differ(calls.values()):
        lines.append("the ranks do not agree: " + _format_calls(calls))
    return lines


def waits_for(positions: Sequence[Position], ended: Collection[int]) -> list[str]:
    """Where ranks wait in a collective for some of `ended`, which will not come to it:
    a line each."""
    running = [each for each in positions if each.is_running]
    calls = {each.rank: each.call for each in running if each.call is not None}
    there = [*running, *(each for each in positions if each.rank in ended)]
    return [
        line
        for here in _by_group(calls)
        for line in _missing_from(here, there, are_running=False)
    ]


def deadlocks(positions: Sequence[Position]) -> list[str]:
    """Where two ranks wait for each other: each is in a collective of another group
    that the other has not come to, or both are in the same one of a group, but call
    different kinds of it or tensors of different sizes. A line for each pair."""
    waiting = {
        each.rank: (each, each.call)
        for each in positions
        if each.is_running
        and each.is_alone
        and each.call is not None
        and each.call.number
    }
    return [
        f"rank {one} waits in {_told(call, others_call)}, and rank {other} in "
        f"{_told(others_call, call)}"
        for one, (position, call) in waiting.items()
        for other, (others_position, others_call) in waiting.items()
        if one < other
        and (
            call.number == others_call.number and _differ([call, others_call])
            if call.group == others_call.group
            else _has_not_come(others_position, call)
            and _has_not_come(position, others_call)
        )
    ]


def _told(call: Call, other: Call) -> str:
    """What it is called beside `other`: with its size where the names are the same."""
    return call.name if call.name != other.name else f"{call.name} of {_size(call)}"


def _has_not_come(position: Position, call: Call) -> bool:
    is_of_group = call.ranks is None or position.rank in call.ranks
    started = position.started.get(call.group, 0)
    return is_of_group and bool(position.started) and started < (call.number or 0)


def _by_group(calls: Mapping[int, Call]) -> Iterable[dict[int, Call]]:
    """The collectives of each group by rank."""
    for group in {call.group: None for call in calls.values() if call.number}:
        yield {
            rank: call
            for rank, call in calls.items()
            if call.group == group and call.number
        }


def _missing_from(
    here: Mapping[int, Call], positions: Sequence[Position], *, are_running: bool
) -> Iterable[str]:
    """The ranks that are not in the last of the collectives of one group, whether they
    run the cell or have left it."""
    last = max(here.values(), key=lambda call: call.number or 0)
    ranks = [
        each.rank
        for each in positions
        if each.rank not in here
        and each.is_running == are_running
        and each.started  # is known
        and (last.ranks is None or each.rank in last.ranks)
        and each.started.get(last.group, 0) < (last.number or 0)
    ]
    if ranks:
        one = len(ranks) == 1
        have, is_, does = ("has", "is", "does") if one else ("have", "are", "do")
        what = f"{have} not come to {last.name}"
        if not are_running:
            what = f"{is_} not in the cell, and {does} not come to {last.name}"
        yield f"{format_ranks(ranks)} {what}"


def _differ(calls: Iterable[Call]) -> bool:
    """Whether these are not all the same collective."""
    return len({_essence(call) for call in calls}) > 1


def _essence(call: Call) -> tuple[Any, ...]:
    """What is the same on all ranks that wait in the same collective."""
    size = call.num_bytes if call.kind in _SAME_SIZE else None
    return call.kind, call.number, size


def _format_calls(calls: Mapping[int, Call]) -> str:
    """As "rank 0 waits in all_reduce #12, ranks 1-3 in broadcast #12"."""
    by_name: dict[str, list[int]] = {}
    names = {call.name for call in calls.values()}
    for rank, call in calls.items():
        name = call.name if len(names) > 1 else f"{call.name} of {_size(call)}"
        by_name.setdefault(name, []).append(rank)
    parts = [f"{format_ranks(ranks)} in {name}" for name, ranks in by_name.items()]
    return ", ".join(parts).replace(" in ", " waits in ", 1)


def _place(position: Position) -> str:
    """As "all_reduce #412 of 1 MiB, at Cell In[7], line 31: loss.backward()"."""
    frame = position.users_frame
    at = ""
    if frame is not None:
        at = f"at {frame.place}" + (
            f": {shorten(frame.source, 100)}" if frame.source else ""
        )
    if position.call is not None:
        call = position.call
        if call.kind == COMPARISON:
            return f"{_COMPARES}, {at}".removesuffix(", ")
        size = f" of {_size(call)}" if call.num_bytes else ""
        return f"{call.name}{size} {at}".rstrip()
    waits = (
        _waits_for_workers(position.frames)
        or _waits_for_build(position.frames)
        or _waits_for_links(position.frames)
    )
    if not position.started:  # from a dump, which says no more than the place
        return at
    does = waits or "not in a collective" + (", computing" if position.is_busy else "")
    return f"{does}, {at}".removesuffix(", ")


def _waits_for_workers(frames: Sequence[Frame]) -> str:
    names = {each.function for each in frames if "utils/data/dataloader" in each.place}
    if names & {"_try_get_data", "_get_data"}:
        return "waits for a worker of its DataLoader"
    return ""


def _waits_for_build(frames: Sequence[Frame]) -> str:
    if any("torch/utils/file_baton" in each.place for each in frames):
        return (
            "waits for another process to build a C++ extension (if none does, as "
            "after a kill: delete the file `lock` in the extension's folder, below "
            "~/.cache/torch_extensions or TORCH_EXTENSIONS_DIR)"
        )
    return ""


def _waits_for_links(frames: Sequence[Frame]) -> str:
    is_new = any("labkit/strategies/mesh/links" in each.place for each in frames)
    return _COMPARES if is_new else ""


def shared_memory_lines(positions: Iterable[Position]) -> list[str]:
    """What to do about a full /dev/shm, where a rank waits for what comes through it.

    The ranks are on this host.
    """
    if not any(_waits_for_workers(each.frames) for each in positions):
        return []
    with contextlib.suppress(OSError):
        _, used, free = shutil.disk_usage(SHARED_MEMORY)
        if free < max(SCARCE_BYTES, used / 10):
            return [
                f"{SHARED_MEMORY}, through which workers send their batches, has room "
                f"for {format_bytes(free)} more: start the container with a larger one "
                "(docker run --shm-size=8g), or use fewer workers or num_workers=0"
            ]
    return []


def _format_stack(frames: Sequence[Frame], *, is_full: bool) -> list[str]:
    """The user's frames, outermost first, and the innermost one of a library."""
    shown = list(frames)
    if not is_full:
        # An import ends in frames of Python's own, which have no file to look into.
        told = [each for each in frames if not each.place.startswith("<")]
        last = [] if not told or told[-1].is_users else [told[-1]]
        shown = [each for each in frames if each.is_users] + last
    return [
        f"{each.place}, in {each.function}"
        + (f": {shorten(each.source, 100)}" if each.source else "")
        for each in shown
    ]


def _size(call: Call) -> str:
    if call.num_bytes < 2**20:
        return f"{call.num_bytes:,} bytes"
    return format_bytes(call.num_bytes)
