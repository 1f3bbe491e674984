"""Shows what `%dist_estimate` predicts: a table, a picture and a sentence."""

import math
from typing import TYPE_CHECKING
from typing import Any

from labkit.records import COMPONENTS
from labkit.strategies import recorded_strategy

if TYPE_CHECKING:
    import pandas as pd

    from labkit.notebook.plots.figure import RunFigure

MODEL_STATES = COMPONENTS[:4]
WITHOUT_ACTIVATIONS = "buffers,\ntemporary tensors"
REST = f"activations, {WITHOUT_ACTIVATIONS}"
SLANTED: Any = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
"""Labels that end at their bars."""
COLUMNS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "master_parameters": "fp32 copy",
    "communication_buffers": "buffers",
    "activations_peak": "activations",
    "total_peak": "peak",
}
"""Short names, so that the table is not wider than a page."""


def unit_of(num_bytes: float) -> tuple[int, str]:
    """The unit in which `num_bytes` is a number of one to four digits."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    found = (name for name, unit in units.items() if num_bytes >= 4 * unit)
    name = next(found, "KiB")
    return units[name], name


def three_digits(value: float) -> str:
    """As 12.3, 123 or 1234; a question mark for what is not known."""
    if math.isnan(value):
        return "?"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


class Forecast:
    """Predicted memory of a rank by world size and strategy.

    Attributes
    ----------
    table : DataFrame
        Bytes by (world_size, strategy) and component, and "fits"; see
        `labkit.estimate.estimate`.
    sentence : str
        What fits, and which option would make more fit.
    device_bytes : float
        Memory of a rank's device.
    """

    def __init__(
        self, table: "pd.DataFrame", sentence: str, device_bytes: float
    ) -> None:
        self.table = table
        self.sentence = sentence
        self.device_bytes = device_bytes

    def __repr__(self) -> str:
        return f"{self.formatted().to_string()}\n{self.sentence}"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.plot())
        display(self.formatted())
        print(self.sentence)

    def formatted(self) -> "pd.DataFrame":
        """Format the table for reading.

        Returns
        -------
        DataFrame
            Three digits in the unit that suits the peaks, which the corner names;
            "yes", "no" or "?" for what fits; and the peak of `prepare` where it is
            above that of a step.
        """
        columns = dict(COLUMNS)
        if (self.table["setup_peak"] > self.table["total_peak"]).any():
            columns["setup_peak"] = "in prepare"
        unit, name = unit_of(self.table["total_peak"].max())
        shown = (self.table[[*columns]] / unit).rename(columns=columns)
        is_known = self.table["activations_peak"].notna()
        shown = shown.map(three_digits)
        shown["peak"] = shown["peak"].where(is_known, ">" + shown["peak"])
        words = {True: "yes", False: "no", None: "?"}
        shown["fits"] = [words[fits] for fits in self.table["fits"]]
        shown.columns.name = name
        return shown

    def plot(self) -> "RunFigure":
        """Plot stacked bars by strategy, and the device's memory.

        Returns
        -------
        RunFigure
            A matplotlib Figure that displays itself, with a panel for each world size.
        """
        from labkit.notebook.plots.figure import RunFigure
        from labkit.notebook.plots.memory_bars import PART_COLOURS
        from labkit.notebook.plots.memory_bars import put_legend_beside
        from labkit.notebook.plots.memory_bars import stack_bars

        is_whole = self.table["activations_peak"].notna().any()
        rest_name = REST if is_whole else WITHOUT_ACTIVATIONS
        colours = {**PART_COLOURS, rest_name: PART_COLOURS["activations_peak"]}
        world_sizes = list(dict.fromkeys(self.table.index.get_level_values(0)))
        num_bars = [len(self.table.loc[size]) for size in world_sizes]
        width = max(7.2, 2.85 + 0.42 * sum(num_bars))
        figure = RunFigure(figsize=(width, 3.5))
        figure.subplots_adjust(0.72 / width, 0.26, 1 - 1.9 / width, 0.85, wspace=0.1)
        rows: Any = figure.subplots(
            *(1, len(num_bars)), sharey=True, squeeze=False, width_ratios=num_bars
        )
        panels = rows[0]
        peaks = self.table["total_peak"]
        # `single` has the whole batch: its bar may be cut, not flatten the others.
        names = peaks.index.get_level_values(1)
        several = peaks[[not recorded_strategy(name).is_single for name in names]]
        highest = several.max() if max(world_sizes) > 1 else peaks.max()
        unit, name = unit_of(highest)
        limit, highest = self.device_bytes / unit, highest / unit
        is_limit_seen = limit < 2 * highest
        top = 1.15 * max(highest, limit * is_limit_seen)
        for panel, world_size in zip(panels, world_sizes, strict=True):
            here = self.table.loc[world_size] / unit
            parts = {name: here[name] for name in MODEL_STATES}
            rest = here["total_peak"] - sum(parts.values())
            parts[rest_name] = rest.clip(lower=0)
            stack_bars(panel, parts, colours, width=0.7)
            for place, peak in enumerate(here["total_peak"]):
                if peak > top:
                    panel.text(place, top, f"{peak:.3g}", ha="center", fontsize=7)
            if is_limit_seen:  # far above the bars it would flatten them
                panel.axhline(
                    limit, color="#333333", ls="--", lw=1.2, label="a device's memory"
                )
            labels = [
                name.replace("_", "\n").replace(" --mesh ", "\n") for name in here.index
            ]
            panel.set_xticks(range(len(here)), labels, fontsize=8, **SLANTED)
            panel.tick_params(axis="y", labelsize=8)
            panel.set_ylim(0, top)
            noun = "rank" if world_size == 1 else "ranks"
            panel.set_title(f"{world_size} {noun}", fontsize=10, pad=12)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel(f"predicted memory of a rank ({name})", fontsize=9)
        put_legend_beside(panels[-1])
        return figure
