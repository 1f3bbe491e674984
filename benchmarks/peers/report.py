"""Figures as a table, a page, a picture, and a list of ratios that have fallen."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from labkit.notebook.plots.style import INK
from labkit.notebook.plots.style import MEDIUM
from labkit.notebook.plots.style import RANK_COLOURS
from labkit.notebook.plots.style import SMALL
from peers.machine import LIMITS
from peers.rows import BY_KEY
from peers.rows import NEXT_LIMIT_S
from peers.rows import PEERS
from peers.rows import ROWS
from peers.rows import Row

FALLEN = 0.9
"""A ratio that is less than so much of the committed one is named."""
Found = dict[str, Any]
"""What a row has of one peer: "values", or "text", "none" (why) or "hangs" (the limit)
in their place."""

HEAD = """# Side by side

labkit and its peers, each in an environment of its own, driven through a real kernel
(torchrun through the shell), by `make bench`: see [Benchmarks](benchmarks.md). They
take turns within one run. Each cell gives the median, with the minimum and maximum in
parentheses; a figure without them was measured once, as every failure is. The best
median in a row is **bold**, even where ranges overlap. Times are seen from the front
end. *Limit* is what the hardware or a bare Python would take, as explained below.
"""


def page(figures: dict[str, Any]) -> str:
    """All of it in Markdown."""
    speed = [row for row in ROWS if not row.is_failure]
    failures = [row for row in ROWS if row.is_failure]
    parts = [
        HEAD,
        machine(figures["machine"]),
        "## Speed and size\n",
        table(figures, speed),
        "## Failures\n",
        "Each failure was tried once. A cell that has not ended by its limit counts as "
        "hung; that time is not part of the next row. Where the next cell does not "
        f"work within {NEXT_LIMIT_S:.0f} s either, the kernel and all ranks are "
        "restarted: the time until a cell works is then that of the restart alone.\n",
        table(figures, failures),
        "\n".join(notes(figures)),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def machine(described: dict[str, Any]) -> str:
    """What the figures were taken on."""
    before, after = described["load_before"], described["load_after"]
    versions = ", ".join(described["versions"].values())
    return (
        f"{described['date']}, in {described['seconds']} s: {described['cores']} cores "
        f"of {described['cpu']}, {described['memory_gib']} GiB, "
        f"{described['system']}, Python {described['python']}; load average "
        f"{before[0]} before and {after[0]} after; two ranks on the CPU over gloo, "
        f"unless stated, one thread each. {versions}.\n"
    )


# ---- the table ----


def table(figures: dict[str, Any], rows: list[Row]) -> str:
    """Those of the rows that were measured."""
    names = peers(figures)
    shown = [row for row in rows if row.key in figures["rows"]]
    lines = [["", *names, "limit"], ["---"] * (len(names) + 2)]
    lines += [
        [row.title, *row_of(row, figures["rows"][row.key], names), limit(row, figures)]
        for row in shown
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def peers(figures: dict[str, Any]) -> list[str]:
    """Those that took part, in order."""
    return [name for name in PEERS if name in figures["machine"]["versions"]]


def row_of(row: Row, found: dict[str, Found], names: list[str]) -> list[str]:
    """Each peer's cell."""
    best = first(row, found)
    shown = [cell(row, found.get(name, {})) for name in names]
    pairs = zip(names, shown, strict=True)
    return [f"**{text}**" if name == best else text for name, text in pairs]


def cell(row: Row, found: Found) -> str:
    """A median with its spread, or what stands in its place."""
    if "hangs" in found:
        return f"no prompt in {found['hangs']:.0f} s"
    if "text" in found:
        return str(found["text"])
    if not (values := found.get("values")):
        return "-"
    middle = quantity(median(values), row.unit)
    if len(values) == 1:
        return middle
    least, most = (quantity(f(values), row.unit) for f in (min, max))
    return f"{middle} ({least} to {most})"


def quantity(value: float, unit: str) -> str:
    """A number to read, with its unit."""
    if unit == "s" and value < 0.1:
        size, name = (1e-3, "ms") if value >= 1e-3 else (1e-6, "µs")
        return f"{three(value / size)} {name}"
    if unit in ("processes", ""):
        return f"{value:.0f}"
    return f"{three(value)} {'/s' if unit == 'steps/s' else unit}"


def three(value: float) -> str:
    """Two or three digits."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"


def limit(row: Row, figures: dict[str, Any]) -> str:
    value = figures["limits"].get(row.limit)
    return "" if value is None else quantity(value, row.unit)


def first(row: Row, found: dict[str, Found]) -> str | None:
    """The peer with the best median."""
    medians = {
        name: median(each["values"])
        for name, each in found.items()
        if each.get("values") and "hangs" not in each
    }
    if not row.is_compared or not medians:
        return None
    choose = max if row.is_more_better else min
    return choose(medians, key=lambda name: medians[name])


def notes(figures: dict[str, Any]) -> Iterator[str]:
    """Where labkit is not first and why, what limits are, and what is missing."""
    behind = [
        (row, best)
        for row in ROWS
        if (best := first(row, figures["rows"].get(row.key, {})))
        not in (None, "labkit")
        and figures["rows"][row.key].get("labkit")
    ]
    if behind:
        yield "## Where labkit is not first\n"
        by_reason: dict[str, list[str]] = {}
        for row, best in behind:
            by_reason.setdefault(row.why, []).append(
                f"{full_title(row)} ({best} is first)"
            )
        for why, which in by_reason.items():
            yield f"- {'; '.join(which)}. {why}"
        yield ""
    yield "## Limits\n"
    for name, value in figures["limits"].items():
        measured = [row for row in ROWS if row.key in figures["rows"]]
        rows = [row for row in measured if row.limit == name]
        if rows:
            yield f"- {LIMITS[name]}: {quantity(value, rows[0].unit)}"
    yield ""
    reasons = missing(figures)
    if reasons:
        yield "## What has no figure\n"
        for (peer, reason), titles in reasons.items():
            yield f"- {peer}, {', '.join(titles)}: {reason}"
        yield ""


def full_title(row: Row) -> str:
    """A row's title where the rows above it are not to be seen."""
    above = ROWS[: ROWS.index(row) + 1][::-1]
    for each in above:
        if each.title.startswith("the same"):
            continue
        if row.title.startswith("the same"):
            return each.title.removesuffix("2 ranks") + row.title.split(", ")[1]
        break
    if row.is_failure:
        kind = row.key.split("_")[0]
        what = BY_KEY[f"{kind}_prompt"].title.removesuffix(": to the prompt")
        return row.title if row.key.endswith("_prompt") else f"{what}: {row.title}"
    return row.title


def missing(figures: dict[str, Any]) -> dict[tuple[str, str], list[str]]:
    """Why a peer has no figure -> in which rows."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        for peer, each in figures["rows"].get(row.key, {}).items():
            if "none" in each and not each.get("values"):
                found.setdefault((peer, each["none"]), []).append(full_title(row))
    return found


# ---- what has fallen ----


def fallen(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """The ratios to labkit that have fallen by a tenth or more since `then`, and what
    hangs or is missing now."""
    found = []
    for row in ROWS:
        new, old = (each["rows"].get(row.key, {}) for each in (now, then))
        if has_number(old) and "labkit" in new and not has_number(new):
            found.append(f"{full_title(row)}: labkit has no figure any more")
        for peer in PEERS[1:]:
            before, after = ratio(row, old, peer), ratio(row, new, peer)
            if before and after and after < FALLEN * before:
                found.append(
                    f"{full_title(row)}: labkit is {after:.2f} times as good as "
                    f"{peer}, it was {before:.2f}"
                )
    return found


def ratio(row: Row, found: dict[str, Found], peer: str) -> float | None:
    """How many times as good labkit is as a peer, where both have figures."""
    ours, theirs = (found.get(n, {}).get("values", []) for n in ("labkit", peer))
    if not (ours and theirs and row.is_compared):
        return None
    us, them = median(ours), median(theirs)
    if not (us and them):
        return None
    return us / them if row.is_more_better else them / us


def has_number(found: dict[str, Found]) -> bool:
    """Whether a row has one of labkit's."""
    return bool(found.get("labkit", {}).get("values"))


# ---- the picture ----

SHOWN = (
    *("start_2", "edit", "cell_2", "push_100"),
    *("raise_prompt", "raise_next", "kill_prompt", "kill_next"),
    *("interrupt_prompt", "interrupt_next"),
)
MARKERS = "oDs^vPX"


def picture(figures: dict[str, Any]) -> Figure:
    """Seconds of every peer, a line for a row; who hangs is at the right edge."""
    rows = [BY_KEY[key] for key in SHOWN if key in figures["rows"]]
    names = peers(figures)
    figure = Figure(figsize=(9, 1.6 + 0.33 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    least, most = 1e-3, 100.0
    for place, name in enumerate(names):
        style: dict[str, Any] = {
            "color": RANK_COLOURS[place],
            "marker": MARKERS[place],
            "markersize": 10 if place == 0 else 7,
            "linestyle": "",
            "zorder": 4 if place == 0 else 3,
        }
        offset = 0.08 * (place - len(names) // 2)  # or they hide each other
        seconds, hanging = [], []
        for line, row in enumerate(rows):
            found = figures["rows"][row.key].get(name, {})
            if "hangs" in found:
                hanging.append((most * 1.15 * 1.2**place, line + offset))
            elif found.get("values"):
                seconds.append((median(found["values"]), line + offset))
        axes.plot(*transposed(seconds), label=name, **style)
        [drawn] = axes.plot(*transposed(hanging), clip_on=False, **style, mfc="none")
        drawn.set_in_layout(False)
    axes.set_xscale("log")
    axes.set_xlim(least, most * 4)
    axes.axvspan(most, most * 4, color="#f2f2f2", zorder=0)
    axes.text(most * 2, -0.75, "no prompt", ha="center", fontsize=SMALL, color=INK)
    axes.set_xticks([1e-3, 1e-2, 0.1, 1, 10], ["1 ms", "10 ms", "0.1 s", "1 s", "10 s"])
    titles = [full_title(row).replace("from there until", "until") for row in rows]
    titles = [title.replace("`", "") for title in titles]
    axes.set_yticks(range(len(rows)), titles)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(labelsize=SMALL, colors=INK)
    axes.grid(True, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(
        "time (log scale), less is better; each failure was tried once",
        fontsize=MEDIUM,
        color=INK,
    )
    figure.legend(loc="outside lower center", ncols=4, fontsize=SMALL, frameon=False)
    return figure


def transposed(points: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [x for x, _ in points], [y for _, y in points]


def write(figures: dict[str, Any], numbers: Path, text: Path, image: Path) -> None:
    """Figures, page and picture as files."""
    numbers.write_text(json.dumps(figures, indent=1) + "\n")
    text.write_text(page(figures))
    picture(figures).savefig(image, dpi=110)
