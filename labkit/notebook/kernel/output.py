"""Shows what ranks print and display: in rank order, equal output once."""

import contextvars
import os
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from labkit import timeouts
from labkit.rank_spec import format_ranks

# A progress bar rewrites its line with "\r": each state of it is a line of its own.
_LINE_END = re.compile(r"\n|\r(?!\Z)")


@dataclass(frozen=True)
class Item:
    """One line of a stream, or one rich output."""

    stream: str
    """"stdout", "stderr", "display" or "clear"."""
    text: str = field(compare=False)
    alike: str
    """What is the same in items that are written once; the text, most often."""
    data: dict[str, Any] = field(default_factory=dict, compare=False)
    transient: dict[str, Any] = field(default_factory=dict, compare=False)


def say(text: str) -> None:
    """Write a line of labkit's own to stderr."""
    print(f"labkit: {text}", file=sys.stderr)


def working_directory() -> str | None:
    """This process's; None where it has been deleted."""
    try:
        return os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return None


def is_notebook() -> bool:
    """Whether this process is a kernel that shows rich output."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def notebook_variables() -> Mapping[str, Any]:
    """The notebook's variables by name; none outside IPython."""
    if "IPython" in sys.modules:
        from IPython import get_ipython

        if (shell := get_ipython()) is not None:
            variables: dict[str, Any] = shell.user_ns
            return variables
    return {}


def execution_count() -> int:
    """The number of the notebook's running cell; 1 outside IPython."""
    if "IPython" in sys.modules:
        from IPython import get_ipython

        if (shell := get_ipython()) is not None:
            # `shell.execution_count` is the next cell's already.
            return max(1, len(shell.history_manager.input_hist_parsed) - 1)
    return 1


class OutputMerger:
    """Takes the ranks' output as it comes and writes it, merged, as it may.

    A line that every rank has said is written at once. One that only some have said
    waits `FOLD_S` for the others, and is then written under the ranks that said it.
    So does the beginning of a line, which may go on later. Nothing is written twice.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        before_write: Callable[[], None] = lambda: None,
        *,
        pids: Mapping[int, int] | None = None,
        may_clear: bool = True,
        label: str = "",
    ) -> None:
        """`pids` are the ranks', by which alone their warnings may differ; `may_clear`
        says whether the output of the cell is theirs alone; `label` tells it from that
        of other ranks at the same time."""
        self._of = f"{label}, " if label else ""
        self._before_write = before_write
        self._own_pid = {
            rank: (
                f"{pid}",
                re.compile(
                    rf"(pid\W{{0,2}}|process |ipykernel_){pid}\b", re.IGNORECASE
                ),
            )
            for rank, pid in (pids or {}).items()
        }
        self._may_clear = may_clear
        self._writers: set[int] = set()
        """The ranks that something was written of, since it was last cleared."""
        self._has_said_why = False
        self._queues: dict[int, list[Item]] = {rank: [] for rank in ranks}
        self._partial: dict[tuple[int, str], str] = {}
        self._rewrites: set[tuple[int, str]] = set()
        """Where the line that has begun takes the place of the one before."""
        self._states: dict[tuple[int, str], str] = {}
        """Of such a line, what is shown already, as it is if another follows."""
        self._oldest: float | None = None
        self._oldest_partial: float | None = None
        self._label = ""
        self._widths: dict[str, int] = {}
        """Of the line in each stream that the next one takes the place of."""
        self._open_stream: Any = None
        """Where the last line written has no end yet."""

    def add_message(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        """Take one iopub message of a rank; other kinds than output are ignored."""
        if kind == "stream":
            self._add_text(rank, content["name"], content["text"])
        elif kind == "clear_output":
            self._end_partial_lines(rank)
            self._append(rank, Item("clear", "", f"wait={content['wait']}", content))
        elif kind in ("display_data", "execute_result", "update_display_data"):
            data = content["data"]
            transient = content.get("transient") or {}
            if kind == "update_display_data":
                transient = {**transient, "update": True}
            elif list(data) == ["text/plain"] and not transient:
                self._end_partial_lines(rank)
                self._add_text(rank, "stdout", f"{data['text/plain']}\n")
                return
            self._end_partial_lines(rank)
            # What may be updated later is shared only by ranks that share its id.
            text = repr((data, transient.get("display_id")))
            self._append(rank, Item("display", text, text, data, transient))

    def write_ready(self) -> None:
        """Write what need not wait any longer."""
        queues = self._queues.values()
        common = 0
        for items in zip(*queues, strict=False):
            if any(item != items[0] for item in items):
                break
            common += 1
        if common:
            self._write_merged({rank: q[:common] for rank, q in self._queues.items()})
            for queue in queues:
                del queue[:common]
            self._oldest = time.monotonic()  # the rest begins to wait only now
        if not any(self._queues.values()):
            self._oldest = None
        elif has_waited(self._oldest):
            self._write_all()
        if has_waited(self._oldest_partial) and not any(self._queues.values()):
            self._take_partial_lines()
            self._write_all()

    def finish(self) -> None:
        """Write everything: no more will come, or the user is asked something."""
        for rank in self._queues:
            self._end_partial_lines(rank)
        self.write_ready()
        self._write_all()
        self._end_open_line()
        self._label = ""  # what is asked now stands between

    # ---- taking ----

    def _add_text(self, rank: int, stream: str, text: str) -> None:
        # A shell command on a pseudo-terminal ends its lines with "\r\n".
        key = rank, stream
        text = (self._partial.pop(key, "") + text).replace("\r\n", "\n")
        shown = self._states.pop(key, None)
        end = 0
        for match in _LINE_END.finditer(text):
            line = text[end : match.end()]
            if line != shown:
                self._append_text(rank, stream, line)
            end, shown = match.end(), None
            self._rewrites.discard(key)
            if line.endswith("\r"):
                self._rewrites.add(key)
        if end < len(text):
            self._partial[key] = text[end:]
            self._oldest_partial = self._oldest_partial or time.monotonic()

    def _take_partial_lines(self) -> None:
        """Queue lines that have only begun: what all ranks have said of them so far,
        or, where they differ, what each has. A progress bar that differs takes a line
        with those of other ranks, and one of its own when it ends."""
        for stream in ("stdout", "stderr"):
            said = {
                rank: self._partial.get((rank, stream), "") for rank in self._queues
            }
            common = common_beginning(list(said.values()))
            if len(common) < min(map(len, said.values())):
                common = ""  # and not a word of which some ranks have the first letter
            for rank, text in said.items():
                key = rank, stream
                if text and not common and key in self._rewrites:
                    state = text.removesuffix("\r") + "\r"
                    if state != self._states.get(key):
                        self._append_text(rank, stream, state)
                    self._states[key] = state
                    continue
                self._partial.pop(key, None)
                self._states.pop(key, None)
                if text:
                    self._append_text(rank, stream, common or text)
                if common and text != common:
                    self._partial[key] = text[len(common) :]
        self._oldest_partial = time.monotonic() if self._partial else None

    def _end_partial_lines(self, rank: int) -> None:
        for stream in ("stdout", "stderr"):
            self._states.pop((rank, stream), None)
            if rest := self._partial.pop((rank, stream), ""):
                end = "" if rest.endswith("\r") else "\n"
                self._append_text(rank, stream, rest + end)

    def _append_text(self, rank: int, stream: str, text: str) -> None:
        alike = text
        pid, pattern = self._own_pid.get(rank, ("", None))
        # Warnings have it, and where a debugger stands.
        may_differ = stream == "stderr" or text.startswith("> ")
        if may_differ and pattern is not None and pid in text:
            alike = pattern.sub(r"\1(pid)", text)
        self._append(rank, Item(stream, text, alike))

    def _append(self, rank: int, item: Item) -> None:
        self._queues[rank].append(item)
        if self._oldest is None:
            self._oldest = time.monotonic()

    # ---- writing ----

    def _write_all(self) -> None:
        self._write_merged(self._queues)
        for queue in self._queues.values():
            queue.clear()
        self._oldest = None

    def _write_merged(self, queues: dict[int, list[Item]]) -> None:
        """Write queues so that what all of them hold in common is written once.

        Between two items that all hold, each rank's own are written as one block;
        ranks with equal blocks share it.
        """
        queues = {rank: queue for rank, queue in queues.items() if queue}
        if not queues:
            return
        places = {rank: _places(queue) for rank, queue in queues.items()}
        starts = dict.fromkeys(queues, 0)
        first = min(queues)
        for item in queues[first]:
            stops = {
                rank: _next_place(places[rank].get(item, []), starts[rank])
                for rank in queues
            }
            if any(stop is None for stop in stops.values()):
                continue
            self._write_blocks(queues, starts, {r: s or 0 for r, s in stops.items()})
            self._write(queues, [item])
            starts = {rank: (stop or 0) + 1 for rank, stop in stops.items()}
        self._write_blocks(queues, starts, {r: len(q) for r, q in queues.items()})

    def _write_blocks(
        self,
        queues: dict[int, list[Item]],
        starts: dict[int, int],
        stops: dict[int, int],
    ) -> None:
        blocks: dict[tuple[Item, ...], list[int]] = {}
        for rank in sorted(queues):
            block = tuple(queues[rank][starts[rank] : stops[rank]])
            if block:
                blocks.setdefault(block, []).append(rank)
        for items, ranks in blocks.items():
            self._write(ranks, items)

    def _write(self, ranks: Iterable[int], items: Iterable[Item]) -> None:
        label = f"[{self._of}{format_ranks(ranks)}] "
        self._before_write()
        for item in items:
            if item.stream == "clear":
                self._clear(ranks, wait=item.data["wait"])
                continue
            self._writers.update(ranks)
            if item.stream == "display":
                self._show(label, item)
                continue
            stream = sys.stderr if item.stream == "stderr" else sys.stdout
            speaker = label + item.stream
            # Others may have written meanwhile, where there are any.
            is_same = speaker == self._label and not self._of
            gutter = " " * len(label) if is_same else label
            if self._open_stream and speaker == self._label:
                gutter = ""
            else:
                self._end_open_line()
            if item.text == "\n" and self._widths.get(item.stream):
                gutter = ""  # the end of that line, which stays
                self._widths[item.stream] = 0
            stream.write(self._covering(gutter + item.text, item.stream))
            # A line that will be rewritten keeps its label, so that it stays there.
            self._label = "" if item.text.endswith("\r") else speaker
            self._open_stream = None
            if not item.text.endswith(("\n", "\r")):
                self._open_stream = stream
                stream.flush()

    def _covering(self, text: str, stream: str) -> str:
        """A line that takes the place of a longer one, with spaces over its rest."""
        line = text.rstrip("\r\n")
        end = text[len(line) :]
        width, self._widths[stream] = self._widths.get(stream, 0), 0
        if end == "\r":
            self._widths[stream] = max(width, len(line))
        return line.ljust(width) + end if end else text

    def _end_open_line(self) -> None:
        if self._open_stream:
            self._open_stream.write("\n")
            self._open_stream = None

    def _clear(self, ranks: Iterable[int], *, wait: bool) -> None:
        """Clear the cell's output for `ranks`, where it holds nothing but theirs."""
        from IPython.display import clear_output

        if self._may_clear and self._writers.issubset(ranks):
            clear_output(wait)
            self._writers.clear()
            self._label, self._open_stream = "", None
        elif not self._has_said_why:
            self._has_said_why = True
            others = (
                "the run's picture" if not self._may_clear else "other ranks' output"
            )
            self._end_open_line()
            say(
                f"clear_output of {format_ranks(ranks)} is ignored: it would clear "
                f"{others} as well"
            )

    def _show(self, label: str, item: Item) -> None:
        from IPython.display import publish_display_data

        transient = dict(item.transient)
        update = transient.pop("update", False)
        self._end_open_line()
        if not update:
            print(label.rstrip())
            sys.stdout.flush()
        self._label = ""
        publish_display_data(item.data, transient=transient, update=update)


def late_output() -> Callable[[int, str, dict[str, Any]], None]:
    """Shows one message of a rank at once, in any thread, under the cell that runs."""
    context = contextvars.copy_context()

    def show(rank: int, kind: str, content: dict[str, Any]) -> None:
        if kind == "clear_output":
            return  # of a cell that has ended, for all of its ranks
        merger = OutputMerger([rank])
        merger.add_message(rank, kind, content)
        merger.finish()

    return lambda rank, kind, content: context.run(show, rank, kind, content)


def common_beginning(texts: Sequence[str]) -> str:
    """The longest text that all of `texts` begin with."""
    first, last = min(texts), max(texts)
    pairs = zip(first, last, strict=False)
    differs = (place for place, (a, b) in enumerate(pairs) if a != b)
    return first[: next(differs, len(first))]


def has_waited(since: float | None) -> bool:
    """Whether what came at `since` is not to wait any longer."""
    return since is not None and time.monotonic() - since > timeouts.FOLD_S


def _places(queue: list[Item]) -> dict[Item, list[int]]:
    places: dict[Item, list[int]] = {}
    for index, item in enumerate(queue):
        places.setdefault(item, []).append(index)
    return places


def _next_place(places: list[int], start: int) -> int | None:
    at = bisect_left(places, start)
    return places[at] if at < len(places) else None
