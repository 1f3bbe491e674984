"""The profile of some steps of a run, on all its ranks: `Run.profile`."""

import functools
import html
import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pandas as pd

from labkit.notebook.profile import costs
from labkit.notebook.profile import gpu
from labkit.notebook.profile.merge import to_one_clock
from labkit.notebook.profile.merge import write_merged
from labkit.notebook.profile.parts import PARTS
from labkit.notebook.profile.parts import StepParts
from labkit.notebook.profile.parts import divide_all
from labkit.notebook.profile.trace import Trace
from labkit.notebook.profile.trace import end_before_updates
from labkit.notebook.profile.trace import read_trace
from labkit.notebook.profile.words import memory_held
from labkit.notebook.profile.words import percent
from labkit.notebook.profile.words import size
from labkit.notebook.profile.words import why_slow
from labkit.notebook.profile.words import without_reason
from labkit.rank_spec import format_ranks
from labkit.records import TRACE_FILE
from labkit.records import significant

if TYPE_CHECKING:
    from labkit.notebook.plots.figure import RunFigure

MERGED_FILE = "all-ranks.trace.json.gz"
MAX_LISTED = 8
"""Ranks whose shares are listed in text."""
PERFETTO = "https://ui.perfetto.dev"
OPEN = """
const link = this.parentNode.querySelector('a');
const page = window.open('{page}');
fetch(link.href).then(found => {{
  if (!found.ok) throw new Error(found.status);
  return found.arrayBuffer();
}}).then(buffer => {{
  const again = setInterval(() => page.postMessage('PING', '{page}'), 200);
  window.addEventListener('message', function hear(event) {{
    if (event.source !== page || event.data !== 'PONG') return;
    clearInterval(again);
    window.removeEventListener('message', hear);
    page.postMessage({{perfetto: {{buffer, title: link.title}}}}, '{page}');
  }});
}}).catch(() => {{
  page.close();
  this.textContent =
    'Could not open: download the file and drop it into ui.perfetto.dev';
}});
"""
"""Perfetto's page answers a PING when it is ready; then it gets the trace from this
window, and fetches nothing."""


@dataclass(eq=False, repr=False)
class StepProfile:
    """What ranks did in the steps that `--profile` has recorded.

    Its text says why they are slow. Times are on one clock: `clocks` says how surely.

    Attributes
    ----------
    name, strategy : str
        The run's.
    folder : Path
        Has the trace of each rank, as TensorBoard's profiler reads them.
    slowdown : float or None
        How many times as long as other steps those took that were recorded; None where
        there are no others to compare with.
    memory : DataFrame
        As `Run.step_memory`: what tensors hold, in bytes by component, at every moment
        of the last measured step, which is none of those that are recorded.
    """

    name: str
    strategy: str
    folder: Path
    ranks: Sequence[int]
    slowdown: float | None = None
    memory: pd.DataFrame = field(default_factory=pd.DataFrame)

    @functools.cached_property
    def _traces(self) -> list[Trace]:
        paths = [self.folder / TRACE_FILE.format(rank) for rank in self.ranks]
        traces = [read_trace(path) for path in paths if path.exists()]
        if self.strategy != "raw":  # a loop may update while gradients are on their way
            for trace in traces:
                end_before_updates(trace)
        to_one_clock(traces)
        return traces

    @functools.cached_property
    def _parts(self) -> dict[int, list[StepParts]]:
        return divide_all(self._traces)

    @property
    def reasons(self) -> list[str]:
        """Sentences on why steps are slow; none that holds in every step: none."""
        return why_slow(self._traces, self._parts, self.strategy)

    @property
    def steps(self) -> pd.DataFrame:
        """The parts of every step: rank, step, seconds and, as shares of it, data (the
        loop waits for a batch), compute, communication (under way while nothing runs),
        other (Python, or sleep), waited (of communication, for ranks that come late),
        and hidden, of the time of collectives, in which the rank computes."""
        rows = [
            {
                "rank": rank,
                "step": each.step.number,
                "seconds": each.seconds,
                **{part: each.share(part) for part in PARTS},
                "waited": sum(each.waits.values()) / 1e6 / each.seconds,
                "hidden": each.hidden / each.collective if each.collective else None,
            }
            for rank, steps in self._parts.items()
            for each in steps
        ]
        return pd.DataFrame(rows)

    @property
    def operators(self) -> pd.DataFrame:
        """Operators by shapes, the costliest first: calls in a step, and milliseconds
        of a step without those that they call; means over the ranks."""
        return costs.operators(self._traces)

    @property
    def modules(self) -> pd.DataFrame:
        """The model's modules, the costliest first: calls in a step, and milliseconds
        of their forward and backward pass; means over the ranks. Empty with
        `--compile`."""
        return costs.modules(self._traces)

    @property
    def kernels(self) -> pd.DataFrame:
        """Of ranks on GPUs: kernels in a step, their mean in microseconds,
        launch_gap_us (median time from the launch call to the start of the kernel),
        idle (the share of the step without any), tflops of matrix products, and mfu,
        their share of the device's dense peak in 16 bits, NaN where that is not
        known."""
        return gpu.kernels(self._traces, self._parts)

    @property
    def allocations(self) -> pd.DataFrame:
        """What the recorded steps allocate and free, as torch's allocator counts it:
        rank, seconds since the first recorded step began, allocated_bytes since the
        recording began, and on a GPU reserved_bytes, which the allocator has of it;
        0 elsewhere."""
        frames = []
        for trace in self._traces:
            began, ended = trace.steps[0].began, trace.steps[-1].ended
            rows = [each for each in trace.memory if began <= each[0] <= ended]
            names = ["seconds", "allocated_bytes", "reserved_bytes"]
            frame = pd.DataFrame(rows, columns=names)
            frame["seconds"] = (frame["seconds"] - began) / 1e6
            frame.insert(0, "rank", trace.rank)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    @property
    def clocks(self) -> pd.DataFrame:
        """By rank, in microseconds: offset, by which its clock was ahead of the first
        rank's and which was corrected; offset_error, by which that may be wrong, NaN
        where ranks had no collective together; and clock_error, by which the
        profiler's times differ from the host's clock at most."""
        rows = [
            (each.rank, each.offset, each.offset_error, each.clock_error)
            for each in self._traces
        ]
        names = ["rank", "offset", "offset_error", "clock_error"]
        return pd.DataFrame(rows, columns=names).set_index("rank")

    @property
    def trace_path(self) -> Path:
        """The trace of all ranks in one file, a lane for each, written when it is first
        asked for."""
        path = self.folder / MERGED_FILE
        if not path.exists():
            paths = {r: self.folder / TRACE_FILE.format(r) for r in self.ranks}
            write_merged(paths, self._traces, path)
        return path

    def plot(self) -> "RunFigure":
        """Plot what every rank does in a step, a lane for each, and below what tensors
        hold on the rank with most. Lanes may be shifted against each other by
        `clocks.offset_error`.

        Returns
        -------
        RunFigure
            A matplotlib Figure that displays itself.
        """
        from labkit.notebook.profile.picture import draw_lanes

        title = f"{self.name} ({self.strategy})"
        return draw_lanes(self._traces, self._parts, title, self.memory)

    def _heading(self) -> str:
        steps = [each for steps in self._parts.values() for each in steps]
        numbers = [each.number for each in self._traces[0].steps]
        which = f"step {numbers[0]}"
        if len(numbers) > 1:
            is_row = len(numbers) == numbers[-1] - numbers[0] + 1
            shown = [numbers[0], numbers[-1]] if is_row else numbers
            which = "steps " + ("-" if is_row else ", ").join(map(str, shown))
        took = significant(1e3 * fmean(each.seconds for each in steps))
        text = f"Profile of {self.name} ({self.strategy}): {which}, {took} ms"
        if len(numbers) > 1:
            text += " each"
        if self.slowdown is not None:
            times = "about" if self.slowdown < 1.1 else f"{self.slowdown:.2g} times"
            text += f", {times} as long as unrecorded steps"
        return text

    def _shares(self) -> list[str]:
        found = []
        for rank, steps in list(self._parts.items())[:MAX_LISTED]:
            shares = [
                f"{part} {percent(fmean(each.share(part) for each in steps))}"
                for part in PARTS
            ]
            found.append(f"rank {rank}: {', '.join(shares)}")
        if len(self._parts) > MAX_LISTED:
            found.append(f"... and {len(self._parts) - MAX_LISTED} more, in .steps")
        missing = [rank for rank in self.ranks if rank not in self._parts]
        if missing:
            found.append(f"{format_ranks(missing)}: nothing was recorded")
        return found

    def __repr__(self) -> str:
        reasons = self.reasons or [without_reason(self._parts)]
        memory = memory_held(self.memory)
        return "\n".join([self._heading(), *self._shares(), *memory, *reasons])

    def _ipython_display_(self) -> None:
        """Words, picture and links, each by itself: pages that show a saved notebook
        leave out a picture within HTML."""
        from IPython.display import display

        from labkit.notebook.plots.figure import to_png
        from labkit.notebook.plots.figure import words_of

        words = f"<pre style='word-break:normal'>{html.escape(repr(self))}</pre>"
        display({"text/plain": repr(self), "text/html": words}, raw=True)
        picture = f"<lanes of {self.name} by rank>"
        figure = self.plot()
        display(
            {"text/plain": picture, "image/png": to_png(figure)},
            raw=True,
            metadata={"image/png": {"alt": words_of(figure)}},
        )
        links = {"text/plain": "The trace of all ranks: profile.trace_path"}
        display({**links, "text/html": self._links()}, raw=True)

    def _links(self) -> str:
        try:
            path = self.trace_path
        except OSError as error:  # a folder that cannot be written to
            return f"<div>No trace of all ranks: {html.escape(str(error))}</div>"
        relative = os.path.relpath(path)
        num_bytes = size(path.stat().st_size)
        script = html.escape(OPEN.format(page=PERFETTO), quote=True)
        folder = html.escape(os.path.relpath(self.folder))
        return (
            f'<div><button onclick="{script}">Open in Perfetto</button> '
            f'<a href="{urllib.parse.quote(relative)}" '
            f'title="{html.escape(self.name)}" download>{html.escape(relative)}</a> '
            f"({num_bytes}, all ranks). Perfetto's page is loaded from the internet; "
            "the trace stays in your browser. Where the button does nothing, drop the "
            "file into <code>ui.perfetto.dev</code>. TensorBoard with "
            f"torch-tb-profiler: <code>tensorboard --logdir {folder}</code></div>"
        )
