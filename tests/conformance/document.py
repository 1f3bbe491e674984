"""The table as a page: `docs/conformance.md`."""

import re
from collections import Counter
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .table import ALL_STRATEGIES
from .table import LOOPS
from .table import MARKS
from .table import OPTIONS
from .table import Cell
from .table import Place
from .table import row

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

MAX_SAID = 2_000
"""Letters of a sentence, beyond which its beginning will do."""

NOT_THE_RUNS = r"zero3, fsdp and hsdp|\((?:or|under) \w+|(?:use|%%dist_train) \w+"
"""Where a sentence lists or recommends strategies, whichever it is said under."""

_INTRODUCTION = """\
# Any loop: right, refused in words, or noted

Every loop in [`tests/conformance/loops`](../tests/conformance/loops) is written as
people write training loops, and runs on two ranks under every strategy. Its result is
compared with that of one process of plain PyTorch on the same batches.

- `✓` right: the result of one process.
- `r` refused: an error that says what labkit found and what to write instead, or that
  plain PyTorch raises too.
- `n` noted: a different result, and a note under the run that says why.

The tests accept nothing else: no wrong result without a note (`W`), no error from
inside a library that does not say what to write instead (`B`), and no hang (`H`).

Each place in the table has four marks, one for each of: {options}.

The table leaves out loops whose result has to differ once a batch is divided among
ranks: a loss over the batch as a whole (in-batch negatives, mixup by a permutation),
and random numbers that the loop draws after `prepare`. These differ from rank to rank
on purpose, so that dropout does.

`STRATEGY` in a message below stands for the strategy of the run. `make conformance`
writes this page.
"""


def page(cells: Sequence[Cell]) -> str:
    """The whole page. Of two cells alike in all but their result the last counts."""
    by_loop: dict[str, list[Cell]] = {}
    for cell in cells:
        by_loop.setdefault(cell.loop, []).append(cell)
    rows = [row(loop, found) for loop, found in by_loop.items()]
    refused = sentences(cell for cell in cells if cell.kind == "refused")
    noted = sentences(cell for cell in cells if cell.kind == "noted")
    return written(rows, refused, noted)


def page_with(old: str, cells: Sequence[Cell]) -> str:
    """The page `old` with these cells' strategies added, or in place of their columns,
    and with a row for each loop that is new.

    Sentences that these strategies alone said before, and say no more, stay: the whole
    table has to be run for that.
    """
    head_line, *lines = [line for line in old.splitlines() if line.startswith("| ")]
    strategies = head_line.strip("| ").split(" | ")[1:]
    rows = []
    on_page = {loop: columns for loop, *columns in map(columns_of, lines)}
    for cell in cells:
        on_page.setdefault(cell.loop, [""] * len(strategies))
    for loop, columns in sorted(on_page.items()):
        marks = dict(zip(strategies, columns, strict=True))
        fresh: dict[str, str] = {}
        for cell in cells:
            if cell.loop == loop:
                before = fresh.get(cell.strategy, "")
                fresh[cell.strategy] = before + MARKS[cell.kind]
        marks |= fresh
        rows.append(f"| {' | '.join([loop, *marks.values()])} |")
    found = {}
    for kind in ("Refused", "Noted"):
        part = old.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
        found[kind] = {
            said: dict.fromkeys(loops.split(", "))
            for said, loops in re.findall(r"^- (.+)\n  \((.+)\)$", part, re.MULTILINE)
        }
        now = sentences(cell for cell in cells if cell.kind == kind.lower())
        for said, loops in now.items():
            there = found[kind].setdefault(said, {}) | loops
            found[kind][said] = {loop: None for loop in LOOPS if loop in there}
    return written(rows, found["Refused"], found["Noted"], marks)


def columns_of(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def written(
    rows: Sequence[str],
    refused: Mapping[str, Iterable[str]],
    noted: Mapping[str, Any],
    strategies: Iterable[str] = ALL_STRATEGIES,
) -> str:
    names = {mark: kind for kind, mark in MARKS.items()}
    totals = Counter(
        names[m] for r in rows for m in r.partition(" | ")[2] if m in names
    )
    lines = [
        _INTRODUCTION.format(options=", ".join(title(name) for name in OPTIONS)),
        f"{len(rows)} loops, {totals.total()} runs: "
        + ", ".join(f"{totals[kind]} {kind}" for kind in MARKS if totals[kind])
        + ".",
        "",
        head(strategies),
        *rows,
        *listed("Refused", refused),
        *listed("Noted", noted),
    ]
    return "\n".join(lines) + "\n"


def title(option: str) -> str:
    """An option as it is written on a magic line."""
    settings: Mapping[str, object] = OPTIONS[option]
    if not settings:
        return "plain"
    return " ".join(f"`--{name} {value}`" for name, value in settings.items())


def head(strategies: Iterable[str]) -> str:
    names = ["loop", *strategies]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def sentences(cells: Iterable[Cell]) -> dict[str, dict[str, None]]:
    """What was said, with the loops to which it was."""
    loops: dict[str, dict[str, None]] = {}
    for cell in cells:
        said = without_strategy(cell.said, cell.strategy)
        if len(said) > MAX_SAID:  # a library's, which names places on the machine
            said = said[:300] + " ..."
        loops.setdefault(without_links(said), {})[cell.loop] = None
    return loops


def listed(heading: str, loops: Mapping[str, Iterable[str]]) -> list[str]:
    """Each sentence once, with the loops to which it was said."""
    if not loops:
        return []
    lines = [f"- {said}\n  ({', '.join(names)})" for said, names in loops.items()]
    return [f"\n## {heading}\n", *lines]


def without_strategy(said: str, strategy: str) -> str:
    """A sentence as it is under every strategy: STRATEGY in place of the run's."""
    return re.sub(
        rf"{NOT_THE_RUNS}|\b({strategy})\b",
        lambda found: "STRATEGY" if found[1] else found[0],
        said,
    )


def without_links(said: str) -> str:
    """A sentence that Markdown takes for no link, as it does "f32[16, 6](S(0))"."""
    return said.replace("](", "]\\(")


def marks_on_page(loop: str) -> dict[Place, str]:
    """What the page says of a loop, by strategy and option."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    strategies = next(columns for name, *columns in lines if name == "loop")
    for name, *columns in lines:
        if name == loop:
            return {
                (strategy, option): mark
                for strategy, marks in zip(strategies, columns, strict=True)
                for option, mark in zip(OPTIONS, marks, strict=True)
            }
    raise LookupError(f"{PAGE.name} has no row for {loop}; write it: make conformance")
