"""Lays runs over each other: one table, one picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from labkit.notebook.history.thinning import thin
from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.memory_bars import stack_memory
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import style_of
from labkit.notebook.runs.run import Run
from labkit.records import COMPONENTS
from labkit.records import MIB
from labkit.records import shorten

_COLUMNS = (
    "run",
    "strategy",
    "ranks",
    "state",
    "steps",
    "last_loss",
    "steps_per_s",
    "seconds",
    *COMPONENTS,
    "wire_bytes",
    "wire_bytes_theory",
    "comm_seconds",
)


def compare_runs(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a run: strategy, ranks, state, steps, last loss, steps/s, memory in bytes
    of the rank that has most, and bytes and seconds of collectives in a step."""
    if not runs:
        return pd.DataFrame(columns=[*_COLUMNS]).set_index("run")
    return pd.DataFrame([_row(run) for run in runs]).set_index("run")


def _row(run: Run) -> dict[str, Any]:
    memory, comm = run.memory, run.comm
    by_rank = comm.groupby("rank")[["wire_bytes", "seconds"]].sum()
    row: dict[str, Any] = {
        "run": run.name,
        "strategy": run.strategy,
        "ranks": run.world_size,
        "state": run.state,
        "steps": run.num_steps,
        "last_loss": run.last_loss,
        "steps_per_s": run.steps_per_s() or np.nan,
        "seconds": run.elapsed(),
    }
    row |= {part: memory[part].max() if len(memory) else np.nan for part in COMPONENTS}
    measured = len(memory) > 0
    row["wire_bytes"] = by_rank["wire_bytes"].max() if len(comm) else 0.0 * measured
    row["wire_bytes_theory"] = run.theory.get("wire_bytes", np.nan)
    row["comm_seconds"] = by_rank["seconds"].max() if len(comm) else 0.0 * measured
    return row


def plot_comparison(runs: Sequence[Run]) -> RunFigure:
    """Loss against step and against time, memory by component, steps/s and bytes."""
    figure = RunFigure(figsize=(12.6, 6.2), dpi=100, facecolor="white")
    figure.subplots_adjust(left=0.06, right=0.9, top=0.95, bottom=0.16)
    grid = figure.add_gridspec(2, 24, hspace=0.4)
    by_step = figure.add_subplot(grid[0, :11])
    by_time = figure.add_subplot(grid[0, 13:], sharey=by_step)
    memory = figure.add_subplot(grid[1, :11])
    speed = figure.add_subplot(grid[1, 16:20])
    wire = figure.add_subplot(grid[1, 22:])
    styles = [style_of(place) for place in range(len(runs))]
    for run, style in zip(runs, styles, strict=True):
        losses = run.mean_loss()
        for axes, column in ((by_step, "step"), (by_time, "seconds")):
            x, y = thin(losses[column].to_numpy(), losses["loss"].to_numpy())
            axes.plot(x, y, lw=1.5, label=shorten(run.name, 14), **style)
    style_axes(by_step, "optimizer step", "loss")
    by_step.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    style_axes(by_time, "seconds", "loss")
    by_time.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8
    )
    table = compare_runs(runs)
    style_axes(memory, "", "memory of a rank (MiB)")
    stack_memory(memory, table[[*COMPONENTS]], theory=[])
    for axes, label, values in (
        (speed, "steps/s", table["steps_per_s"]),
        (wire, "MiB sent in a step", table["wire_bytes"] / MIB),
    ):
        style_axes(axes, "", label)
        colours = [style["color"] for style in styles]
        axes.bar(np.arange(len(runs)), values.fillna(0.0), 0.72, color=colours)
        labels = [shorten(name, 14) for name in table.index]
        axes.set_xticks(np.arange(len(runs)), labels)
    theory = table["wire_bytes_theory"] / MIB
    places = np.arange(len(runs))
    wire.hlines(theory, places - 0.36, places + 0.36, color="black", lw=1.6)
    wire.set_ylim(0.0, 1.15 * max(1e-6, *theory.fillna(0.0), *wire.get_ylim()))
    wire.set_title("black: theory", fontsize=8)
    for axes in (memory, speed, wire):
        axes.grid(visible=False, axis="x")
        for tick in axes.get_xticklabels():
            tick.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")
    return figure
