"""Asks the user what ranks ask: at `input`, and in a debugger."""

import getpass
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable

from labkit import timeouts
from labkit.notebook.kernel.output import say
from labkit.rank_spec import format_ranks
from labkit.rank_spec import parse_ranks
from labkit.records import COMMAND
from labkit.records import COMMANDS
from labkit.records import SECRET
from labkit.records import Question

HOW = (
    "what you type goes to every rank at the prompt; `1: p loss` goes to rank 1 alone. "
    "h lists the commands, c continues; q, or the stop button, ends the cell on every "
    "rank, with variables kept"
)
_ADDRESSED = re.compile(r"\s*(all(?=:\s)|\d[\d\s,-]*):\s*(.*)", re.DOTALL)
_QUITS = re.compile(r"\s*(q|quit|exit|EOF)\s*(\(\s*\))?\s*")

Answer = Callable[[int, int, str], object]
"""Sends (rank, the question's number, the line)."""


def can_type() -> bool:
    """Whether this thread can ask the user."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if "IPython" in sys.modules:
        from labkit.compat.ipython import allows_input

        if (allows := allows_input()) is not None:
            return allows
    try:
        return sys.stdin.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def read_line(prompt: str, *, is_secret: bool = False) -> str:
    """What the user types; KeyboardInterrupt and EOFError as `input`."""
    # The wait for a cell only notes an interrupt.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return getpass.getpass(prompt) if is_secret else input(prompt)
    finally:
        signal.signal(signal.SIGINT, previous)


class Keyboard:
    """What the ranks of one cell ask, and the user's answers.

    Ranks that ask the same are asked for at once, and get the same line. A debugger's
    commands are for all that are in one: they go through the cell together, and meet in
    its collectives.
    """

    _has_said_how = False
    """Whether the user knows what can be typed: once a kernel."""

    def __init__(self, ranks: Collection[int], answer: Answer) -> None:
        self._answer = answer
        self._asked: dict[int, Question] = {}
        self._num_ranks = max(ranks) + 1
        self._awaited = set(ranks)
        """Those that may ask in a moment, as they were answered together."""
        self._since = 0.0
        """When one has asked, or was answered."""

    def take(self, rank: int, question: Question) -> None:
        """A rank asks something."""
        if not self._asked:
            self._since = time.monotonic()
        self._asked[rank] = question

    def is_due(self, running: Collection[int]) -> bool:
        """Whether to ask the user now: those that were answered together have all asked
        again, or had the time for it."""
        for rank in self._asked.keys() - running:
            del self._asked[rank]
        if not self._asked:
            return False
        are_all = self._asked.keys() >= self._awaited.intersection(running)
        return are_all or time.monotonic() - self._since > timeouts.FOLD_S

    def ask(self) -> bool:
        """Ask the user, and send the line; False where the cell is to end."""
        first = self._asked[min(self._asked)]
        try:
            if first.kind in COMMANDS:
                return self._ask_for_command(first.text)
            asked = first.text, first.kind  # a secret is shown to nobody
            same = [r for r, q in self._asked.items() if (q.text, q.kind) == asked]
            prompt = f"[{format_ranks(same)}] {first.text}"
            self._send(same, read_line(prompt, is_secret=first.kind == SECRET))
        except (KeyboardInterrupt, EOFError):
            return False
        return True

    def _ask_for_command(self, text: str) -> bool:
        there = [rank for rank, each in self._asked.items() if each.kind in COMMANDS]
        if not Keyboard._has_said_how:
            Keyboard._has_said_how = True
            say(HOW)
        while True:
            line = read_line(f"[{format_ranks(there)}] {text}")
            try:
                ranks, line = self._addressed(line, there)
            except ValueError as error:
                say(f"{error}")
                continue
            kinds = {self._asked[rank].kind for rank in ranks}
            if _QUITS.fullmatch(line) and COMMAND in kinds:
                return False
            self._send(ranks, line)
            return True

    def _addressed(self, line: str, there: Collection[int]) -> tuple[list[int], str]:
        """The ranks that a line is for, and the rest of it."""
        if (found := _ADDRESSED.fullmatch(line)) is None or found[1] == "all":
            return [*there], line if found is None else found[2]
        ranks = parse_ranks(found[1].strip(), self._num_ranks)
        if away := set(ranks).difference(there):
            raise ValueError(
                f"{format_ranks(away)} cannot take a command now; at the prompt: "
                f"{format_ranks(there)}"
            )
        return ranks, found[2]

    def _send(self, ranks: Iterable[int], line: str) -> None:
        self._awaited = set(ranks)
        for rank in self._awaited:
            self._answer(rank, self._asked.pop(rank).number, line)
        self._since = time.monotonic()
