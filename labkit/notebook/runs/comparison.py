"""Lays runs over each other: one table, one picture."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from labkit.notebook.history.thinning import thin
from labkit.notebook.plots.figure import RunFigure
from labkit.notebook.plots.memory_bars import stack_peaks
from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import SMALL
from labkit.notebook.plots.style import style_axes
from labkit.notebook.plots.style import style_of
from labkit.notebook.plots.style import use_title
from labkit.notebook.runs.run import Run
from labkit.records import COMPONENTS
from labkit.records import PARTS
from labkit.records import memory_unit
from labkit.records import shorten

WIDE = 10
"""So many times as many bytes are seen on a log scale."""
_COLUMNS = (
    *("run", "strategy", "ranks", "state", "steps", "last_loss", "steps_per_s"),
    *("seconds", *COMPONENTS, "wire_bytes", "wire_bytes_theory", "comm_seconds"),
)


def compare_runs(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a run: strategy, ranks, state, steps, last loss, steps/s, memory in bytes
    of the rank that has most, and bytes and seconds of collectives in a step."""
    rows = [_row(run, name) for run, name in zip(runs, called(runs), strict=True)]
    return pd.DataFrame(rows, columns=[*_COLUMNS]).set_index("run")


def called(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its own, or its folder's where two have the same."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 or run.folder is None else run.folder.name
        for run, name in zip(runs, names, strict=True)
    ]


def _labels(runs: Sequence[Run]) -> list[str]:
    """Short names for a picture: where two have the same, with the time before it."""
    names = [run.name for run in runs]
    return [
        shorten(
            run.name if names.count(run.name) == 1 else f"{_clock(run)} {run.name}", 16
        )
        for run in runs
    ]


def _clock(run: Run) -> str:
    return time.strftime("%H:%M:%S", time.localtime(run.info.get("began", 0.0)))


def _row(run: Run, name: str) -> dict[str, Any]:
    memory, comm = run.memory, run.comm
    # Seconds that nobody measured stay unknown, and are not 0.
    by_rank = comm.groupby("rank")[["wire_bytes", "seconds"]].sum(min_count=1)
    row: dict[str, Any] = {
        "run": name,
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
    """Loss against step, time and bytes sent; memory at its peak, steps/s, bytes."""
    figure = RunFigure(figsize=(11.0, 6.4))
    plot_losses(figure, runs)
    plot_costs(figure, runs)
    return figure


def plot_losses(figure: RunFigure, runs: Sequence[Run]) -> None:
    """The upper half: loss against step, time and bytes sent."""
    by_step = figure.add_axes((0.065, 0.6, 0.225, 0.33))
    by_time = figure.add_axes((0.345, 0.6, 0.225, 0.33), sharey=by_step)
    by_bytes = figure.add_axes((0.625, 0.6, 0.225, 0.33), sharey=by_step)
    labels = _labels(runs)
    for place, run in enumerate(runs):
        losses = run.mean_loss()
        losses["seconds"] -= losses["seconds"].min()
        for axes, column in ((by_step, "step"), (by_time, "seconds")):
            x, y = thin(losses[column].to_numpy(), losses["loss"].to_numpy())
            axes.plot(x, y, lw=1.6, label=labels[place], **style_of(place))
    style_axes(by_step, "optimizer step", "loss")
    use_title(by_step, "loss by step")
    by_step.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    by_step.xaxis.set_major_formatter("{x:,.0f}")
    style_axes(by_time, "seconds since the first step", "")
    use_title(by_time, "loss by time")
    by_time.xaxis.set_major_locator(MaxNLocator(5))
    plot_by_bytes(by_bytes, runs)
    by_bytes.legend(
        *by_step.get_legend_handles_labels(),
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=SMALL,
    )


def plot_costs(figure: RunFigure, runs: Sequence[Run]) -> None:
    """The lower half: memory at its peak, steps/s, bytes sent."""
    memory = figure.add_axes((0.065, 0.13, 0.31, 0.32))
    speed = figure.add_axes((0.575, 0.13, 0.165, 0.32))
    wire = figure.add_axes((0.815, 0.13, 0.165, 0.32))
    stack_peaks(memory, pd.DataFrame([_at_peak(run) for run in runs]))
    use_title(memory, "memory of a rank at its peak")
    table = compare_runs(runs)
    places = np.arange(len(runs))
    sent, expected = table["wire_bytes"], table["wire_bytes_theory"]
    greatest = float(np.nanmax([*sent, *expected, 0.0]))
    unit, name = memory_unit(greatest)
    for axes, title, label, values in (
        (speed, "speed", "steps/s", table["steps_per_s"]),
        (wire, "sent by a rank in a step", name, sent / unit),
    ):
        style_axes(axes, "", label)
        use_title(axes, title)
        colours = [style_of(int(place))["color"] for place in places]
        axes.bar(places, values.fillna(0.0), 0.72, color=colours)
    if expected.notna().any() and greatest:
        lines = wire.hlines(
            expected / unit, places - 0.36, places + 0.36, color="black", lw=1.6
        )
        wire.set_ylim(0.0, 1.25 * greatest / unit)
        wire.legend(
            [lines], ["theory"], frameon=False, fontsize=SMALL, loc="upper left"
        )
    labels = _labels(runs)
    for axes in (memory, speed, wire):
        axes.set_xticks(places, labels)
        axes.set_xlim(-0.6, len(runs) - 0.4)
        axes.grid(visible=False, axis="x")
        for tick in axes.get_xticklabels():
            tick.set(rotation=35, horizontalalignment="right", rotation_mode="anchor")


def plot_by_bytes(axes: Axes, runs: Sequence[Run]) -> None:
    """Loss against the bytes that a rank has sent, of the runs that send any; on a log
    scale where some send many times as much as others."""
    curves = {}
    for place, run in enumerate(runs):
        losses = run.mean_loss().merge(run.sent_bytes, on="step")
        losses = losses[losses["num_bytes"] > 0]
        if len(losses):
            curves[place] = losses
    ends = [float(each["num_bytes"].iloc[-1]) for each in curves.values()]
    unit, name = memory_unit(max(ends, default=0.0))
    for place, losses in curves.items():
        x = losses["num_bytes"].to_numpy() / unit
        x, y = thin(x, losses["loss"].to_numpy())
        axes.plot(x, y, lw=1.6, **style_of(place))
    style_axes(axes, f"{name} sent by a rank so far", "")
    use_title(axes, "loss by bytes")
    if ends and max(ends) > WIDE * min(ends):
        axes.set_xscale("log")
    if not ends:
        axes.text(
            *(0.5, 0.5, "no run sends anything"),
            transform=axes.transAxes,
            ha="center",
            fontsize=SMALL,
            color=INK,
        )


def _at_peak(run: Run) -> dict[str, float]:
    """What the rank that holds most has at that moment, bytes by part; where moments
    were not seen, the states at their greatest, and what is left of the peak."""
    moments = run.peak_moments()[[*PARTS]]
    if len(moments):
        place = int(moments.sum(axis=1).to_numpy().argmax())
        return {part: float(moments[part].iloc[place]) for part in PARTS}
    if run.memory.empty:
        return dict.fromkeys(PARTS, 0.0)
    most = run.memory.iloc[int(run.memory["total_peak"].to_numpy().argmax())]
    states = {part: float(most[part]) for part in PARTS if part in most}
    rest = max(0.0, float(most["total_peak"]) - sum(states.values()))
    return {**dict.fromkeys(PARTS, 0.0), **states, "activations": rest}
