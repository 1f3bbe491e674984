"""Says in a sentence which strategies fit a device, and what would make others fit."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.estimate.rows import STRATEGIES
from labkit.estimate.rows import WITH_MESH
from labkit.estimate.rows import strategy_of
from labkit.records import format_bytes
from labkit.strategies import find_strategy
from labkit.strategies.unsupported import check_supported

if TYPE_CHECKING:
    import pandas as pd

SETUP_PEAK = "setup_peak"
LEFT_OUT = "left_out"


def needed(table: "pd.DataFrame") -> "pd.Series[Any]":
    """What a rank needs, for a step or already in `prepare`."""
    return table[["total_peak", SETUP_PEAK]].max(axis=1)


def fitting(table: "pd.DataFrame", world_size: int, device_bytes: float) -> list[str]:
    """The strategies that fit on so many ranks."""
    peaks = needed(table).loc[world_size]
    return [name for name in peaks.index if peaks[name] <= device_bytes]


def what_would_fit(
    estimate_with: Callable[..., "pd.DataFrame"],
    table: "pd.DataFrame",
    device_bytes: float,
    *,
    batch_size: int,
    accumulate: int = 1,
    activation_checkpointing: bool = False,
    precision: str = "fp32",
) -> str:
    """One sentence or two: what fits at the least world size, and what would.

    `estimate_with(accumulate=K, strategies=S)` and
    `estimate_with(activation_checkpointing=True, strategies=S)` give the table of some
    strategies with that option changed.
    """
    world_size, *others = sorted(set(table.index.get_level_values("world_size")))
    says = what_fits(table, world_size, device_bytes)
    names = [*table.loc[world_size].index]
    fits = fitting(table, world_size, device_bytes)
    if len(fits) == len(names):
        return " ".join(says)
    # Nobody asks on several ranks how one of them could do all the work.
    sought = {
        name for name in names if world_size == 1 or not strategy_of(name).is_single
    }
    lacking = sought - set(fits)
    ways = []

    def note(way: str, found: "pd.DataFrame", num_ranks: int = world_size) -> None:
        # On more ranks a strategy may have meshes that it has not on these.
        strategies = {strategy_of(name).name for name in lacking}
        if gained := [
            name
            for name in fitting(found, num_ranks, device_bytes)
            if name in lacking
            or (name not in names and strategy_of(name).name in strategies)
        ]:
            ways.append(f"{way} {named(gained)} would")
            lacking.difference_update(gained)

    if lacking and not activation_checkpointing:
        found = estimate_with(activation_checkpointing=True, strategies=lacking)
        note("with --activation-checkpointing", found)
    times = 2 * accumulate
    while lacking and times <= batch_size // world_size:
        found = estimate_with(accumulate=times, strategies=lacking)
        note(f"with --accumulate {times}", found)
        times *= 2
    for more in others:
        note(f"on {more} ranks", table, more)
    if ways:
        says.append(f"{'; '.join(ways)}.".capitalize())
    elif lacking == sought:
        left = ["more ranks (--ranks)"]
        left += ["a smaller batch"] * (batch_size > world_size)
        left += ["--precision bf16"] * (precision == "fp32")
        says.append(f"Left to try: {listed(left)}.")
    return " ".join(says)


def what_fits(table: "pd.DataFrame", world_size: int, device_bytes: float) -> list[str]:
    """Which strategies fit as they are, and which do so but for their `prepare`."""
    here = ranks_of(world_size, device_bytes)
    fits = fitting(table, world_size, device_bytes)
    steps = table.loc[world_size]["total_peak"]
    if len(fits) == len(steps):
        return [f"On {here} every strategy fits."]
    least = needed(table).loc[world_size].astype(float)
    says = [
        f"On {here} {named(fits)} fit{'s' * (len(fits) == 1)}."
        if fits
        else f"On {here} nothing fits: {least.idxmin()} needs least, "
        f"{format_bytes(least.min())}."
    ]
    if late := [n for n in steps.index if n not in fits and steps[n] <= device_bytes]:
        says.append(
            f"A step under {named(late)} would fit, but prepare needs up to "
            f"{format_bytes(least[late].max())}: a part of the model is whole on a "
            "rank before it is sharded."
        )
    return says


def what_can_fit(table: "pd.DataFrame", device_bytes: float) -> str:
    """The advice without activations: which strategies cannot fit."""
    says = []
    for world_size in sorted(set(table.index.get_level_values("world_size"))):
        least = table.loc[world_size]["total_peak"]
        large = [name for name in least.index if least[name] > device_bytes]
        here = ranks_of(world_size, device_bytes)
        says.append(
            f"On {here} {named(large)} cannot fit."
            if large
            else f"On {here} the model states fit under every strategy."
        )
    return " ".join(says)


def ranks_of(world_size: int, device_bytes: float) -> str:
    return f"{world_size} rank{'s' * (world_size > 1)} of {format_bytes(device_bytes)}"


def refusal(model: nn.Module) -> str:
    """Which strategies cannot train a model like this, and why; "" where all can."""
    errors = {}
    for strategy in STRATEGIES:
        try:
            check_supported(model, find_strategy(strategy))
        except UnsupportedLoopError as error:
            errors[strategy] = str(error)
    if not errors:
        return ""
    first = next(iter(errors.values()))
    return f"As it is, {listed([*errors])} cannot train it: {first}."


def what_is_left_out(table: "pd.DataFrame") -> str:
    """Which strategies have no row, and why; "" where all have one."""
    says = []
    left_out: dict[tuple[int, str], str] = table.attrs[LEFT_OUT]
    for name in STRATEGIES:
        found = {size: why for (size, words), why in left_out.items() if words == name}
        if found:
            why = next(iter(found.values())).partition(": ")[0]
            ranks = f"rank{'s' * (max(found) > 1)}"
            says.append(
                f"{name} is left out on {listed([*map(str, found)])} {ranks}: {why}."
            )
    return " ".join(says)


def named(rows: Sequence[str]) -> str:
    """ "a, b and c --mesh dp=4,tp=2 or dp=2,tp=4": as a magic line has them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        strategy, word, mesh = row.partition(WITH_MESH)
        found.setdefault(strategy + word, []).append(mesh)
    return listed([name + " or ".join(meshes) for name, meshes in found.items()])


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
