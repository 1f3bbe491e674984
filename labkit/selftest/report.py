"""What the checks have found: as text, as HTML, and as Markdown for an issue."""

import contextlib
import getpass
import html
import re
import shutil
import socket
import sys
import textwrap
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

from labkit.notebook.runs.progress import duration
from labkit.selftest.machine import Finding
from labkit.selftest.machine import Machine

OK = "ok"
LOOK = "look"
FAILED = "FAILED"
NOT_RUN = "not run"
NOT_APPLICABLE = "n/a"
_COLOURS = {OK: "#2a7f3f", LOOK: "#9a6700", FAILED: "#c0392b"}
_PUBLIC = {"root", "user", "localhost"}
"""Names of users and hosts that say nothing about either."""


@dataclass(frozen=True)
class Line:
    """What one check has found."""

    name: str
    what: str
    state: str
    text: str = ""
    advice: str = ""
    details: str = ""
    """What does not fit into a line."""
    seconds: float = 0.0

    @property
    def said(self) -> str:
        """What is in the table: the text, and what to do."""
        return "; ".join(filter(None, [self.text, self.advice]))


@dataclass(eq=False, repr=False)
class Report:
    """What a self-test has found; displays itself as a table.

    Attributes
    ----------
    lines : list of Line
        One for each check: name, what, state ("ok", "look", "FAILED", "not run" or
        "n/a"), text, advice, details and seconds.
    machine : Machine
        What was read of the machine.
    findings : list of Finding
        What of it is worth a word: what, and advice.
    seconds : float
        How long all of it took.
    is_whole : bool
        Whether every check had its turn: no interrupt came.
    file : Path or None
        Where it was written.
    """

    machine: Machine
    findings: Sequence[Finding]
    lines: list[Line] = field(default_factory=list)
    seconds: float = 0.0
    is_whole: bool = False
    file: Path | None = None

    @property
    def is_right(self) -> bool:
        """Whether all that was to be checked was, and none has failed."""
        states = {line.state for line in self.lines}
        return self.is_whole and not states & {FAILED, NOT_RUN}

    @property
    def headline(self) -> str:
        """All of it in a sentence."""
        counts = []
        for state, word in (
            (OK, "right"),
            (LOOK, "right, and worth a look"),
            (FAILED, "failed"),
            (NOT_RUN, "not run"),
            (NOT_APPLICABLE, "not applicable here"),
        ):
            count = sum(line.state == state for line in self.lines)
            counts += [f"{count} {word}"] if count else []
        took = duration(self.seconds, digits=1)
        end = f"in {took}" if self.is_whole else f"interrupted after {took}"
        return f"labkit check: {', '.join(counts) or 'nothing checked'}; {end}"

    def __repr__(self) -> str:
        return "\n".join(self._text(shutil.get_terminal_size((100, 24)).columns))

    def _text(self, width: int) -> Iterator[str]:
        yield self.headline
        yield from textwrap.wrap(self.machine.describe(), width)
        yield ""
        first = max([len(line.what) for line in self.lines], default=0)
        start = first + 11  # two spaces beside each state
        for line in self.lines:
            parts = textwrap.wrap(line.said, max(width - start, 30)) or [""]
            yield f"{line.what:{first}}  {line.state:7}  {parts[0]}".rstrip()
            yield from (" " * start + part for part in parts[1:])
        for line in self.lines:
            if line.details:
                yield f"\n{line.what}:"
                yield textwrap.indent(line.details, "    ")
        if self.findings:
            yield "\nAbout this machine:"
        for finding in self.findings:
            yield textwrap.fill(
                f"{finding}", width, initial_indent="- ", subsequent_indent="  "
            )
        if self.file is not None:
            yield f"\nWritten to {self.file}, to paste into an issue."

    def _repr_html_(self) -> str:
        rows = []
        for line in self.lines:
            colour = _COLOURS.get(line.state, "inherit")
            said = html.escape(line.said)
            if line.details:
                said += f"<details><pre>{html.escape(line.details)}</pre></details>"
            rows.append(
                f"<tr><td style='text-align:left'>{html.escape(line.what)}</td>"
                f"<td style='color:{colour}'>{html.escape(line.state)}</td>"
                f"<td style='text-align:left'>{said}</td>"
                f"<td>{line.seconds:.1f} s</td></tr>"
            )
        found = "".join(
            f"<li>{html.escape(each.what)}: <em>{html.escape(each.advice)}</em></li>"
            for each in self.findings
        )
        parts = [
            f"<p><strong>{html.escape(self.headline)}</strong><br>"
            f"{html.escape(self.machine.describe())}</p>",
            f"<table>{''.join(rows)}</table>",
            f"<p>About this machine:</p><ul>{found}</ul>" if found else "",
        ]
        if self.file is not None:
            file = html.escape(str(self.file))
            parts.append(f"<p>Written to {file}, to paste into an issue.</p>")
        return "".join(parts)

    def to_markdown(self) -> str:
        """Write it for an issue: without names of users, hosts and home folders.

        Returns
        -------
        str
            A table of the checks, what failed in full, the machine and its settings.
        """
        return without_names("\n".join(self._markdown()) + "\n")

    def _markdown(self) -> Iterator[str]:
        yield f"### {self.headline}\n"
        yield "| check | result | found | seconds |"
        yield "|---|---|---|---|"
        for line in self.lines:
            said = line.said.replace("|", "\\|")
            yield f"| {line.what} | {line.state} | {said} | {line.seconds:.1f} |"
        for line in self.lines:
            if line.details:
                yield f"\n{line.what}:\n"
                yield textwrap.indent(line.details, "    ")
        yield f"\nMachine: {self.machine.describe()}\n"
        for finding in self.findings:
            yield f"- {finding}"
        if settings := self.machine.environment:
            yield f"\nEnvironment: {' '.join(f'{k}={v}' for k, v in settings.items())}"

    def write(self, file: Path) -> None:
        """Write the Markdown to a file.

        Parameters
        ----------
        file : path
            Replaced where it is there.
        """
        file.write_text(self.to_markdown(), encoding="utf-8")
        self.file = file


def without_names(text: str) -> str:
    """`text` without the names of this user and host, and the paths of its home."""
    for path, name in ((str(Path.home()), "~"), (sys.prefix, "PREFIX")):
        if len(path) > 1:
            text = text.replace(path, name)
    text = re.sub(r"(/home|/Users)/[^/\s:'\"]+", "~", text)
    host = socket.gethostname()
    names = {host: "HOST", host.split(".")[0]: "HOST"}
    with contextlib.suppress(OSError, KeyError):  # a user id may have no name
        names[getpass.getuser()] = "USER"
    for name, word in names.items():
        if name and name not in _PUBLIC:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, text)
    return text
