"""Shows a run while it runs: one output, displayed once, updated in place."""

import shutil
import sys
import time
from typing import Any

from labkit.notebook.background import Job
from labkit.notebook.runs import Run
from labkit.records import shorten

REFRESH_S = 0.5
MAX_LOAD = 0.2
"""The share of a core that drawing may take."""


class LiveView:
    """The live picture of a run in a notebook; a line of text in a terminal.

    Works in every front end: a PNG behind a display id needs no extension, and its
    last state stays in the saved notebook.
    """

    refresh_s = REFRESH_S

    def __init__(self, run: Run) -> None:
        self.run = run
        self.num_draws = 0
        self._plot: Any = None
        self._handle: Any = None
        self._next_draw = time.monotonic() + self.refresh_s
        self._num_drawn = -1
        self._has_failed = False
        self._in_notebook = is_notebook()
        self._in_terminal = not self._in_notebook and sys.stdout.isatty()
        self._line_width = 0
        """Of the line of text that is on the terminal now."""

    def tick(self) -> None:
        """Draw if it is time to and there is something new."""
        if time.monotonic() >= self._next_draw:
            self._try_to_refresh()

    def close(self) -> None:
        """Draw the last state."""
        self._num_drawn = -1
        self._try_to_refresh()
        if self._line_width:
            print()

    def make_way(self) -> None:
        """Take the line of text away: something else is about to be printed."""
        if self._line_width:
            print("\r" + " " * self._line_width, end="\r", flush=True)
            self._line_width = 0

    def follow(self) -> None:
        """Show the run until it ends."""
        while self.run.refresh().state == "running":
            self.tick()
            self.run.has_ended.wait(REFRESH_S / 2)
        self.close()

    def _try_to_refresh(self) -> None:
        """Refresh; a picture that cannot be drawn is not to end the run."""
        if self._has_failed:
            return
        try:
            self._refresh()
        except Exception as error:  # drawing what a user logged may raise anything
            self._has_failed = True
            print(f"labkit: the live picture stopped: {error!r}", file=sys.stderr)

    def _refresh(self) -> None:
        num_records = sum(self.run.collector.num_records.values())
        if not num_records or num_records == self._num_drawn:
            return
        self._num_drawn = num_records
        took = 0.0
        if self._in_notebook:
            if self._plot is None:
                # The first time this imports matplotlib, which is not drawing.
                from labkit.notebook.plots import RunPlot

                self._plot = RunPlot(self.run.collector, log_scale=self.run.log_scale)
            started = time.thread_time()
            self._draw()
            took = time.thread_time() - started
            self.num_draws += 1
        elif self._in_terminal:
            self._write_line()
            self.num_draws += 1
        self._next_draw = time.monotonic() + max(self.refresh_s, took / MAX_LOAD) - took

    def _write_line(self) -> None:
        line = self.run.status_line()
        if self.run.state == "running":
            # One that wraps cannot be rewritten: "\r" goes back over one row only.
            line = shorten(line, shutil.get_terminal_size().columns - 1)
        self.make_way()
        print(line, end="", flush=True)
        self._line_width = len(line)

    def _draw(self) -> None:
        if self.run.state == "running":
            self.run.update_plot(self._plot)
        else:
            self.run.finish_plot(self._plot)
        self._show({"image/png": self._plot.png()})

    def _show(self, data: dict[str, Any]) -> None:
        """Put `data`, by mime type, in the view's one place in the output."""
        from IPython.display import display

        # Constant, because nbval compares it with what the first display had.
        text = f"<live picture of {self.run.name}: loss and memory by rank>"
        bundle = {**data, "text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def show(run: Run) -> None:
    """Show a run in this cell: live while it runs, and its last picture then."""
    view = LiveView(run)
    if run.state == "running" and is_notebook():
        Job(view.follow, name=f"labkit view of {run.name}")
    else:
        view.close()


def is_notebook() -> bool:
    """Whether this process is a kernel that shows rich output."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")
