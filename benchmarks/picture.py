"""What a refresh of the live picture costs: CPU time, by ranks and points.

A run has so many steps already; then some more come between two refreshes, as in a run,
and the picture is updated and encoded as the live view does it. The axes' limits are
redrawn now and then, which the mean holds and the median does not. "first" is the
refresh that finds the whole history, as after a reload.
"""

import time
from itertools import pairwise
from statistics import median

import numpy as np
from _measure import parser
from _measure import print_table

from labkit.notebook.history.collector import Collector
from labkit.notebook.plots.run_plot import RunPlot
from labkit.notebook.runs.progress import progress_line
from labkit.notebook.runs.progress import remarks
from labkit.notebook.runs.run import Run
from labkit.records import RECORD
from labkit.records import Batch
from labkit.records import Progress

COLUMNS = [
    *("ranks", "steps", "first", "data", "median", "mean", "worst"),
    *("refreshes/s", "PNG/KiB"),
]
LOAD = 0.2
"""The share of a core that drawing may take: the live view waits for the rest."""


def main() -> None:
    args = parser(__doc__, refreshes=20, new=100).parse_args()
    rows = [
        measure(num_ranks, num_steps, args.refreshes, args.new)
        for num_ranks in (2, 8, 16)
        for num_steps in (1_000, 10_000, 100_000)
    ]
    print_table(
        f"CPU milliseconds of one refresh, with {args.new} new steps of every rank",
        COLUMNS,
        rows,
    )


def measure(
    num_ranks: int, num_steps: int, num_refreshes: int, num_new: int
) -> list[str]:
    """A run of `num_steps` steps a rank and more, with loss and another metric."""
    collector = Collector(range(num_ranks))
    run = Run("run-1", "ddp", "", collector)
    rng = np.random.default_rng(0)
    total = num_steps + num_refreshes * num_new
    for rank in collector.ranks:
        collector.progress[rank] = Progress(1, epochs=1, steps_per_epoch=total)
    plot = RunPlot(collector)
    bounds = [0, *range(num_steps, total + 1, num_new)]
    data, whole = [], []
    for begin, end in pairwise(bounds):
        steps = np.arange(begin, end) + 1
        for rank in range(num_ranks):
            records = make_records(rng, steps, total)
            names = ["loss", "samples", "gradient_norm"]
            collector.add(rank, Batch(3 * begin, names, records))
        began = time.process_time()
        collector.curves.update()
        data.append(1000 * (time.process_time() - began))
        plot.update(progress_line(run), remarks=remarks(run), num_steps=total)
        png = plot.png()
        whole.append(1000 * (time.process_time() - began))
    mean = float(np.mean(whole[1:]))
    often = min(2.0, 1000 * LOAD / mean)
    figures = (whole[0], median(data[1:]), median(whole[1:]), mean, max(whole[1:]))
    return [
        str(num_ranks),
        f"{num_steps:,}",
        *(f"{figure:.1f}" for figure in figures),
        f"{often:.1f}",
        f"{len(png) / 1024:.0f}",
    ]


def make_records(
    rng: np.random.Generator, steps: np.ndarray, num_steps: int
) -> np.ndarray:
    """Three metrics at each of `steps`, in the order of logging."""
    records = np.empty((len(steps), 3), dtype=RECORD)
    records["metric"] = [0, 1, 2]
    records["step"] = steps[:, None]
    records["seconds"] = 0.002 * steps[:, None]
    records["memory_bytes"] = 2**27 + 2**20 * (steps[:, None] % 100)
    loss = 0.3 + 2.0 * np.exp(-3.0 * steps / num_steps)
    records["value"][:, 0] = loss + 0.1 * rng.normal(size=len(steps))
    records["value"][:, 1] = 16
    records["value"][:, 2] = np.abs(rng.normal(size=len(steps)))
    return records.ravel()


if __name__ == "__main__":
    main()
