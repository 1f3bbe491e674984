"""What a user sees when a cell did not end well on every rank."""

import re
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from types import TracebackType
from typing import Any

from labkit.notebook.history.consistency import step_mismatches
from labkit.notebook.kernel.output import notebook_variables
from labkit.rank_spec import format_ranks
from labkit.records import CellEnd
from labkit.records import Outcome

LOST_CONNECTION = re.compile(
    r"gloo.*(Connection (closed|reset) by peer|Broken pipe)|ncclRemoteError"
    r"|the connection to rank \d+ is lost",
    re.DOTALL,
)
"""In an error of a collective: the process at the other end has gone."""
UNDEFINED = re.compile(r"name '(\w+)' is not defined")
LINE = re.compile(r"line (\d+)")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
FRAME = re.compile(r"^(?:Cell|File) .*", re.MULTILINE)
"""The head of each frame of a traceback, as IPython renders it."""


class _Sent:
    """An exception that another process, or a copy, has as it is: pickle would call
    its class with the message alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args, self.__dict__)  # type: ignore[attr-defined]


def _made_again(kind: Any, args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class RankError(_Sent, RuntimeError):
    """A cell failed on a rank: the first to fail in full, the others in one line.

    Attributes
    ----------
    rank : int
        The first that failed.
    outcomes : list of Outcome
        How the cell ended on each rank, in rank order.
    """

    def __init__(self, first: Outcome, outcomes: Sequence[Outcome]) -> None:
        self.rank = first.rank
        self.outcomes = list(outcomes)
        self._first = first
        self._hint = [*in_notebook(first), *on_others(first, self.outcomes)]
        lines = [self._headline(), *self._memory(), *self._hint, *self._others()]
        super().__init__("\n".join(lines))

    def _headline(self) -> str:
        return self._first.in_full()

    def _memory(self) -> list[str]:
        """What the first rank held, if that is why it failed."""
        memory = self._first.memory
        return (
            [f"Memory of rank {self.rank} at that moment:\n{memory}"] if memory else []
        )

    def _others(self) -> list[str]:
        first = self._first
        same = [
            each.rank
            for each in self.outcomes
            if each.rank != first.rank and is_same_failure(each, first)
        ]
        lines = [f"{format_ranks(same)}: the same"] if same else []
        for each in self.outcomes:
            if each.rank == first.rank or each.rank in same:
                continue
            if first.status == "died" and LOST_CONNECTION.search(each.evalue):
                lost = f"lost its connection to rank {first.rank}"
                each = replace(each, evalue=lost)
            what = "died" if first.status == "died" else "failed"
            is_freed = each.status == "interrupted"
            because = f", because rank {first.rank} {what}" if is_freed else ""
            lines.append(each.summary(because))
        return lines

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of our own frames: the rank's traceback."""
        leave_at_users_line(self)
        first = self._first
        if not first.traceback:
            return [self._headline(), *self._memory(), *self._hint, *self._others()]
        freed = [f"rank {self.rank}: {first.freed()}"] if first.freed() else []
        head = f"On rank {self.rank}:"
        more = [*self._memory(), *self._hint, *freed, *self._others()]
        return [head, *first.traceback, *more]


class Interrupted(_Sent, KeyboardInterrupt):
    """The user stopped a cell; every rank has, and keeps its variables."""

    def __init__(self, outcomes: Sequence[Outcome], reason: str) -> None:
        self.outcomes = list(outcomes)
        self._reason = reason
        super().__init__("\n".join([reason, *self._lines()]))

    def _lines(self) -> list[str]:
        return [each.summary() for each in self.outcomes]

    def _render_traceback_(self) -> list[str]:
        return [self._reason, *self._lines()]


class CellTimeoutError(_Sent, TimeoutError):
    """A cell ran longer than `--timeout` allowed and was stopped on every rank."""

    def __init__(self, outcomes: Sequence[Outcome], timeout_s: float) -> None:
        self.outcomes = list(outcomes)
        lines = [each.summary() for each in self.outcomes]
        reason = f"the cell ran longer than {timeout_s:g} seconds (--timeout)"
        super().__init__("\n".join([reason, *lines]))

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def in_notebook(first: Outcome) -> list[str]:
    """What to say of a name that a cell does not find on a rank, where the notebook
    has it: a variable of the one is none of the other's."""
    undefined = UNDEFINED.search(first.evalue)
    frames = FRAME.findall(COLOUR.sub("", "\n".join(first.traceback)))
    if first.ename != "NameError" or undefined is None or not frames:
        return []
    # A library's own name may by chance be one of the notebook's.
    if not frames[-1].startswith("Cell"):
        return []
    name, variables = undefined[1], notebook_variables()
    if name not in variables:
        return []
    if isinstance(variables[name], ModuleType):
        return [
            f"the notebook has imported {name}, and ranks import for themselves: write "
            "that import into a %%dist cell too"
        ]
    where = "; a function that was pushed before takes it along if it is pushed again"
    return [
        f"the notebook has {name}, and ranks have variables of their own: %dist_push "
        f"{name} copies it to them" + where * (", in " in frames[-1])
    ]


def on_others(first: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    """What to say of a name that one rank does not find, where others seem to have it:
    it may have been restarted, or a cell for some ranks has made it."""
    undefined = UNDEFINED.search(first.evalue)
    if first.ename != "NameError" or undefined is None or "restarted" in first.evalue:
        return []
    line = _line(first)
    have = [each.rank for each in outcomes if each.status == "ok" or _line(each) > line]
    if not have:
        return []
    return [
        f"{format_ranks(have)} went past this line. If {undefined[1]} is there, the "
        f"cell that made it has not run on rank {first.rank}, or not since its "
        f"restart: %%dist {first.rank} at the top of that cell runs it there alone"
    ]


def _line(outcome: Outcome) -> int:
    """The line of the cell at which it ended; 0 where that is not known."""
    found = LINE.match(outcome.where)
    return int(found[1]) if found else 0


def in_one_line(error: BaseException) -> str:
    """What an error says, in a line; of one of ranks, how the first failed."""
    if isinstance(error, RankError):
        return {each.rank: each for each in error.outcomes}[error.rank].summary()
    return next(iter(str(error).splitlines()), "")


def leave_at_users_line(error: BaseException) -> None:
    """Cut off our own frames of a traceback: `%debug` is to open the user's line."""
    users: TracebackType | None = None
    frames = error.__traceback__
    while frames is not None:
        package = frames.tb_frame.f_globals.get("__name__", "").split(".")[0]
        if package == "labkit":
            if users is not None:
                users.tb_next = None
            return
        if package != "IPython":
            users = frames
        frames = frames.tb_next


def unheard(ends: Mapping[int, CellEnd]) -> list[str]:
    """What to say of cells that have ended without a kernel, by rank of the lab."""
    said: list[str] = []
    cells: dict[int, dict[int, CellEnd]] = {}
    for rank, end in sorted(ends.items()):  # trials may have run on parts of the lab
        cells.setdefault(end.number, {})[rank] = end
    for cell in cells.values():
        in_order = sorted(cell.values(), key=lambda end: end.at)
        if (first := first_failure([end.outcome for end in in_order])) is not None:
            error = RankError(first, [end.outcome for end in cell.values()])
            said.append(f"the previous kernel's cell has failed\n{error}")
        steps = {rank: end.steps for rank, end in cell.items() if end.steps}
        said += step_mismatches(steps).values()
    return said


def is_same_failure(one: Outcome, other: Outcome) -> bool:
    """Whether two ranks failed alike: the same error at the same line."""
    return (one.status, one.ename, one.evalue, one.where) == (
        other.status,
        other.ename,
        other.evalue,
        other.where,
    )


def first_failure(in_order: Sequence[Outcome]) -> Outcome | None:
    """The failure to show in full, of outcomes in the order in which they came.

    A death comes before all: what the other ranks raised follows from it. Of equal
    failures it is the lowest rank's, so that the same mistake reads the same.
    """
    failed = [each for each in in_order if each.status == "died"]
    failed += [each for each in in_order if each.status == "error"]
    if not failed:
        return None
    alike = [each for each in failed if is_same_failure(each, failed[0])]
    return min(alike, key=lambda each: each.rank)
