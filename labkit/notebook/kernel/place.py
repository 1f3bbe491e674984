"""One place in a cell's output, whose last state alone is to be seen."""

import shutil
from typing import Any

from labkit.records import shorten


class Place:
    """Rich output that is displayed once and updated then; a line in a terminal."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._width = 0
        """Of the line of text that is on the terminal now."""

    @property
    def is_filled(self) -> bool:
        return self._handle is not None or self._width > 0

    def show(self, bundle: dict[str, Any], *, alt: str = "") -> None:
        """Display a value for each mime type; `alt` says in words what a picture
        shows."""
        from IPython.display import display

        how: dict[str, Any] = {"raw": True}
        if alt:
            how["metadata"] = {"image/png": {"alt": alt}}
        if self._handle is None:
            self._handle = display(bundle, display_id=True, **how)
        else:
            self._handle.update(bundle, **how)

    def write(self, line: str, *, is_last: bool = False) -> None:
        """Write a line in place of the one before; the last one may wrap."""
        if not is_last:
            # One that wraps cannot be rewritten: "\r" goes back over one row only.
            line = shorten(line, shutil.get_terminal_size().columns - 1)
        self.clear()
        print(line, end="", flush=True)
        self._width = len(line)

    def clear(self) -> None:
        """Take the line away: something else is about to be printed."""
        if self._width:
            print("\r" + " " * self._width, end="\r", flush=True)
            self._width = 0
