"""Shows a study while it runs: one picture of all trials, or one line in a terminal."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future

from labkit import timeouts
from labkit.notebook.kernel.output import is_notebook
from labkit.notebook.kernel.place import Place
from labkit.notebook.live.render_process import GONE
from labkit.notebook.live.render_process import Picture
from labkit.notebook.live.render_process import painter
from labkit.notebook.tuning.study import Study

REFRESH_S = 1.0
MAX_LOAD = 0.1
"""The share of a core that drawing may take."""


class ViewOfThreads:
    """What threads have of the view, which the main one draws."""

    def __init__(self, view: "StudyView") -> None:
        self.clear_line = view.clear_line

    def tick(self) -> None:
        """The main thread's does it."""


class StudyView:
    """Displayed once, updated in place; drawn in the painter's process."""

    def __init__(self, study: Study, *, is_shown: bool) -> None:
        self._study = study
        self._in_notebook = is_shown and is_notebook()
        self._in_terminal = is_shown and not is_notebook() and sys.stdout.isatty()
        self._place = Place()
        self.clear_line = self._place.clear
        self._picture: Future[Picture] | None = None
        self._next = time.monotonic() + REFRESH_S
        self.left: Callable[[], str] = str
        """What is left of the study, in words, asked for when they are drawn."""

    def tick(self) -> None:
        """Show a picture that is ready, or ask for one if it is time to."""
        now = time.monotonic()
        if self._picture is not None and self._picture.done():
            picture, self._picture = self._picture, None
            try:
                found = picture.result()
            except GONE:  # its process has died; there will be another
                return
            self._next = max(self._next, now + found.cpu_s / MAX_LOAD)
            self._show(found.png)
        elif self._picture is None and now >= self._next:
            self._next = now + REFRESH_S
            if self._in_notebook:
                self._picture = painter().draw(self._study.drawing(self.left()))
            elif self._in_terminal:
                self._write_line()

    def close(self) -> None:
        """Show the last state."""
        self.left = str
        if self._in_notebook and (self._study.trials or self._place.is_filled):
            drawing = self._study.drawing()
            try:
                picture = painter().draw(drawing, is_last=True)
                png = picture.result(timeouts.LAST_PICTURE_S).png
            except (*GONE, TimeoutError):
                png = drawing.png()  # here, for the process has died
            self._show(png)
        elif self._in_terminal:
            self._write_line()
            print()

    def _write_line(self) -> None:
        self._place.write(f"{self._study.summary()}{self.left()}")

    def _show(self, png: bytes) -> None:
        # Constant, because nbval compares it with what the first display had.
        text = f"<picture of the study {self._study.name}: all trials>"
        alt = f"{self._study.summary()}; a curve and a point for each trial"
        self._place.show({"image/png": png, "text/plain": text}, alt=alt)
