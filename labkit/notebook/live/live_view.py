"""Shows a run while it runs: one output, displayed once, updated in place."""

import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

from labkit import timeouts
from labkit.host.devices import num_cores
from labkit.notebook.kernel.background import Job
from labkit.notebook.kernel.output import is_notebook
from labkit.notebook.kernel.output import say
from labkit.notebook.kernel.place import Place
from labkit.notebook.live.render_process import GONE
from labkit.notebook.live.render_process import Picture
from labkit.notebook.live.render_process import PictureRequest
from labkit.notebook.live.render_process import painter
from labkit.notebook.live.unsent import Unsent
from labkit.notebook.runs.progress import marks
from labkit.notebook.runs.progress import memory_is_of
from labkit.notebook.runs.progress import planned_steps
from labkit.notebook.runs.progress import progress_line
from labkit.notebook.runs.progress import remarks
from labkit.notebook.runs.run import Run
from labkit.records import NO_STEPS

REFRESH_S = 0.5
NO_RECORDS = (
    "no optimizer step was taken and nothing was logged, so nothing is plotted. A "
    "training cell calls optimizer.step() or log(loss=...); %%dist runs any other code "
    "on the ranks"
)
MAX_LOAD = 0.2
"""The share of a core that drawing may take."""
LASTING_LOAD = 0.01
"""The share of all cores in the end: the ranks need them, and the picture changes less
and less."""
GROWTH = 0.5
"""Until then the next picture is due when the run has lasted this much longer."""
MAX_FAILURES = 2
"""How often the painter's process may die in a run."""

_paintings = itertools.count()


class LiveView:
    """The live picture of a run in a notebook; a line of text in a terminal.

    Works in every front end: a PNG behind a display id needs no extension, and its
    last state stays in the saved notebook.
    """

    refresh_s = REFRESH_S

    def __init__(self, run: Run) -> None:
        self.run = run
        self._place = Place()
        self.clear_line = self._place.clear
        self._picture: Future[Picture] | None = None
        """What the painter is drawing."""
        self._asked_at = 0.0
        self._num_failures = 0
        self._began = time.monotonic()
        self._next_draw = self._began + self.refresh_s
        self._num_drawn = -1
        self._has_failed = False
        self._in_notebook = is_notebook()
        self._in_terminal = not self._in_notebook and sys.stdout.isatty()
        self._ended_paintings: list[int] = []
        """Those that the painter may forget."""
        self._start_painting()

    def tick(self) -> None:
        """Show a picture that is ready, or ask for one if it is time to and there is
        something new."""
        if self._picture is not None:
            if self._picture.done():
                self._try(self._take_picture)
        elif time.monotonic() >= self._next_draw:
            self._try(self._refresh)

    def catch_up(self) -> None:
        """Show all that is there now: while the user types, nothing is drawn."""
        for _ in range(2):  # what is being drawn may lack the last records
            self._next_draw = 0.0
            self.tick()
            if self._picture is not None:
                wait([self._picture], timeouts.CATCH_UP_S)
                self.tick()

    def close(self) -> None:
        """Show the last state, also where a picture before could not be drawn."""
        self._num_drawn = -1
        self._has_failed = False
        self._try(self._refresh)
        if self._in_terminal and self._place.is_filled:
            print()
        # A run that resumes, and has nothing to do, says so.
        is_said = NO_STEPS in self.run.notes or self.run.resumed_from is not None
        if self.run.state == "finished" and self.is_empty and not is_said:
            say(NO_RECORDS)

    def follow(self) -> None:
        """Show the run until it ends."""
        while self.run.refresh().state == "running":
            self.tick()
            self.run.has_ended.wait(REFRESH_S / 2)
        self.close()

    def _try(self, do: Callable[[], None]) -> None:
        """Do it; a picture that cannot be drawn is not to end the run."""
        if self._has_failed:
            return
        try:
            do()
        except Exception as error:  # drawing what a user logged may raise anything
            self._has_failed = True
            print(f"labkit: the live picture stopped: {error!r}", file=sys.stderr)

    def _refresh(self) -> None:
        num_records = self._num_records
        is_there = num_records or self._place.is_filled
        is_late = time.monotonic() - self._began > timeouts.EMPTY_AFTER_S
        is_late &= self.run.state == "running"
        if not (is_there or is_late) or num_records == self._num_drawn:
            return
        self._num_drawn = num_records
        self._next_draw = time.monotonic() + self.refresh_s
        if self._in_notebook:
            self._draw()
        elif self._in_terminal:
            is_last = self.run.state != "running"
            self._place.write(self.run.status_line(), is_last=is_last)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self._num_records and not self.run.has_profile

    @property
    def _num_records(self) -> int:
        return sum(self.run.collector.num_records.values())

    def _draw(self) -> None:
        if self.run.state == "running":
            self._asked_at = time.monotonic()
            self._picture = painter().draw(self._request())
            return
        self._restart_painting()
        memory = self.run.memory_beside_theory()
        request = replace(
            self._request(),
            is_final=True,
            memory=None if memory is None else (memory, self.run.peak_moments()),
        )
        try:
            picture = painter().draw(request, is_last=True)
            png = picture.result(timeouts.LAST_PICTURE_S).png
        except (*GONE, TimeoutError):
            png = self.run.plot()._repr_png_()  # here, for the process has died
        self._show({"image/png": png})

    def _request(self) -> PictureRequest:
        """The next picture, with what its painter does not have yet."""
        new, continues = self._unsent.take()
        if not continues:
            self._restart_painting()
            new, _ = self._unsent.take()
        ended, self._ended_paintings = self._ended_paintings, []
        return PictureRequest(
            self._painting,
            self.run.collector.ranks,
            self.run.log_scale,
            new,
            progress_line(self.run),
            remarks(self.run),
            planned_steps(self.run),
            memory_is_of(self.run),
            marks(self.run),
            ended_views=ended,
        )

    def _take_picture(self) -> None:
        assert self._picture is not None
        picture, self._picture = self._picture, None
        try:
            found = picture.result()
        except GONE:
            self._num_failures += 1
            if self._num_failures > MAX_FAILURES:
                raise
            self._restart_painting()  # its process has died; there will be another
            return
        least_s = max(self.refresh_s, found.cpu_s / MAX_LOAD)
        most_s = found.cpu_s / (LASTING_LOAD * num_cores())
        wait_s = min(GROWTH * (self._asked_at - self._began), most_s)
        self._next_draw = self._asked_at + max(least_s, wait_s)
        self._show({"image/png": found.png})

    def _restart_painting(self) -> None:
        """The next picture is of all records, whatever was drawn before."""
        self._ended_paintings.append(self._painting)
        self._start_painting()

    def _start_painting(self) -> None:
        self._painting = next(_paintings)
        self._unsent = Unsent(self.run.collector)

    def _show(self, data: dict[str, Any]) -> None:
        """Put `data`, by mime type, in the view's one place in the output."""
        # Constant, because nbval compares it with what the first display had.
        text = f"<live picture of {self.run.name}: loss and memory by rank>"
        alt = ""
        if "image/png" in data:
            alt = f"{progress_line(self.run)}; loss and memory by rank and step"
        self._place.show({**data, "text/plain": text}, alt=alt)


def show(run: Run) -> None:
    """Show a run in this cell: live while it runs, and its last picture then."""
    view = LiveView(run)
    if run.state == "running" and is_notebook():
        Job(view.follow, name=f"labkit view of {run.name}")
    elif view.is_empty:
        say(f"{run.name} is {run.state} and has no records: there is nothing to plot")
    else:
        view.close()
