"""Draws live pictures in a process of its own, at the lowest priority.

A training loop on full cores, whose ranks wait for each other, would wait for every
picture that the kernel drew; so would the kernel's own answer to a failure. The last
picture of a run has the usual priority: its ranks have ended, and the prompt waits for
it, for seconds where other people's processes fill the cores.
"""

import atexit
import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Protocol

from labkit.records import Batch

if TYPE_CHECKING:
    import pandas as pd

    from labkit.notebook.history.marks import Mark
    from labkit.notebook.live.unsent import New
    from labkit.notebook.plots.run_plot import RunPlot

NICENESS = 19
"""Where the system has no SCHED_IDLE."""
SESSION_NICENESS = 10
"""Of its session where Linux shares the cores among sessions: a tenth of what a rank
has. At 19, a seventieth, a busy machine drew one picture in several seconds."""

GONE = (EOFError, OSError, CancelledError, pickle.UnpicklingError)
"""What asking a painter raises whose process has ended, at whatever moment."""


@dataclass(frozen=True)
class PictureRequest:
    """One picture: what is new since the last one of the same view, and its words."""

    view: int
    ranks: Sequence[int]
    log_scale: bool
    new: "New"
    title: str
    remarks: list[str]
    num_steps: int | None
    memory_is: str = ""
    marks: "Sequence[Mark]" = ()
    is_final: bool = False
    memory: "tuple[pd.DataFrame, pd.DataFrame] | None" = None
    """Of the final picture: see `RunPlot.add_memory`."""
    ended_views: Sequence[int] = ()
    """Those that ask for no more pictures."""


class Drawing(Protocol):
    """A picture that is drawn from what it holds alone."""

    def png(self) -> bytes:
        """Drawn."""


@dataclass(frozen=True)
class Picture:
    png: bytes
    cpu_s: float
    """What it took to draw it."""


class Painter:
    """A process that keeps the figures of views and draws them when asked.

    It ends with this process, however that ends: its input closes.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is for the cell, not for it
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="labkit-painter")

    def draw(
        self, request: PictureRequest | Drawing, *, is_last: bool = False
    ) -> "Future[Picture]":
        """The picture, some time later; does not wait for it. The last one of its view
        has the usual priority.

        The future raises one of `GONE` where the process has ended.
        """
        return self._thread.submit(self._ask, request, is_last)

    def _ask(self, request: PictureRequest | Drawing, is_last: bool) -> Picture:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((request, is_last), self._process.stdin, protocol=5)
        self._process.stdin.flush()
        answer: Picture | Exception = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(cancel_futures=True, wait=False)
        with contextlib.suppress(OSError):  # it may be gone
            self._process.kill()
        self._process.wait()


_painter: Painter | None = None
_lock = threading.Lock()


def painter() -> Painter:
    """This process's painter; makes one where there is none."""
    global _painter
    with _lock:
        if _painter is None or not _painter.is_alive:
            _painter = Painter()
        return _painter


@atexit.register
def close() -> None:
    """End this process's painter, if there is one; `painter` makes another."""
    global _painter
    with _lock:
        if _painter is not None:
            _painter.close()
            _painter = None


# ---- in its process ----


def main() -> None:
    """Answer requests until the input closes."""
    from labkit.notebook.plots.run_plot import RunPlot

    gc.freeze()  # what stays: to collect the rest takes milliseconds
    # Linux has a priority for each thread, and a thread cannot raise its own again. The
    # imports, which the first picture waits for, are done before.
    aside = ThreadPoolExecutor(1, initializer=give_way)
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    plots: dict[int, RunPlot] = {}
    while True:
        try:
            request, is_last = pickle.load(inbox)
        except EOFError:
            return
        if is_last:
            answer = drawn(request, plots)
        else:
            answer = aside.submit(drawn, request, plots).result()
        pickle.dump(answer, outbox)
        outbox.flush()
        if is_last:
            del request  # it has all records, and so has its figure, a cycle
            gc.collect()


def drawn(
    request: PictureRequest | Drawing, plots: "dict[int, RunPlot]"
) -> Picture | Exception:
    """The picture, or what was raised."""
    try:
        began = time.process_time()
        if isinstance(request, PictureRequest):
            png = paint(request, plots)
        else:
            png = request.png()
        return Picture(png, time.process_time() - began)
    except Exception as error:
        return error


def give_way() -> None:
    """Draw when the ranks leave a core, and on ones that they fill now and then.

    At a low priority alone it would still be given a time slice while a rank waits to
    be woken, and all the others would wait for that rank.
    """
    # With autogroup, sessions share the cores whatever the policies in them are: that
    # of the painter's own session has to give way.
    with contextlib.suppress(OSError):  # Linux has it, where it is on
        Path("/proc/self/autogroup").write_text(str(SESSION_NICENESS))
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # Linux has it
        with contextlib.suppress(AttributeError, OSError):
            os.nice(NICENESS)


def paint(request: PictureRequest, plots: "dict[int, RunPlot]") -> bytes:
    """The picture as a PNG; `plots` are those of the views by now."""
    from labkit.notebook.history.collector import Collector
    from labkit.notebook.plots.run_plot import RunPlot

    for view in request.ended_views:
        plots.pop(view, None)
    plot = plots.get(request.view)
    if plot is None:
        plot = RunPlot(
            Collector(request.ranks),
            log_scale=request.log_scale,
            memory_is=request.memory_is,
        )
    if not request.is_final:
        plots[request.view] = plot
    collector = plot.collector
    for rank, (names, records) in request.new.items():
        sequence = collector.num_received[rank]
        collector.add(rank, Batch(sequence, names, records))
    plot.update(
        request.title,
        remarks=request.remarks,
        num_steps=request.num_steps,
        marks=request.marks,
        is_final=request.is_final,
    )
    if request.memory is not None:
        plot.add_memory(*request.memory)
    return plot.png()
