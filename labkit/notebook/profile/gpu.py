"""What a GPU does of a step: its kernels, how late they begin, its share of peak."""

from collections.abc import Sequence
from math import prod
from statistics import fmean
from statistics import median
from typing import Any

import pandas as pd

from labkit.notebook.profile.costs import in_steps
from labkit.notebook.profile.costs import length
from labkit.notebook.profile.parts import StepParts
from labkit.notebook.profile.trace import Event
from labkit.notebook.profile.trace import Trace

PEAK_FLOPS = {
    **{"H200": 989e12, "H100": 989e12, "A100": 312e12, "V100": 125e12},
    **{"L40S": 362e12, "L4": 121e12, "T4": 65e12},
}
"""Dense, in 16 bits, by a part of the device's name: NVIDIA's data sheets (SXM)."""
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Operators that multiply two matrices, and the place of the first among their
inputs."""
COLUMNS = ["rank", "kernels", "mean_us", "launch_gap_us", "idle", "tflops", "mfu"]


def kernels(traces: Sequence[Trace], parts: dict[int, list[StepParts]]) -> pd.DataFrame:
    """A row for each rank on a GPU."""
    rows = []
    for trace in traces:
        events = in_steps(trace)
        found = [each for each in events if each.kind == "kernel"]
        if not found:
            continue
        steps = parts[trace.rank]
        seconds = sum(each.seconds for each in steps)
        flops = sum(map(flops_of, events)) / seconds
        peak = peak_of(trace.device_name)
        rows.append(
            {
                "rank": trace.rank,
                "kernels": len(found) / len(steps),
                "mean_us": fmean(map(length, found)),
                "launch_gap_us": launch_gap(trace, found),
                "idle": fmean(each.share("other") for each in steps),
                "tflops": flops / 1e12,
                "mfu": flops / peak if peak else float("nan"),
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS).set_index("rank")


def launch_gap(trace: Trace, found: Sequence[Event]) -> float:
    """Median microseconds from the launch call to the start of the kernel: long
    where the GPU has enough to do, some microseconds where it waits for calls."""
    calls = {
        each.args.get("correlation"): each.began
        for each in trace.events
        if each.kind in ("cuda_runtime", "cuda_driver")
    }
    gaps = [
        each.began - calls[number]
        for each in found
        if (number := each.args.get("correlation")) in calls
    ]
    return median(gaps) if gaps else float("nan")


def flops_of(event: Event) -> float:
    """Of a matrix product, by its shapes; 0 for all other operators."""
    if event.kind != "cpu_op" or event.name not in PRODUCTS:
        return 0.0
    shapes: list[Any] = event.args.get("Input Dims") or []
    first = PRODUCTS[event.name]
    if len(shapes) < first + 2:
        return 0.0
    left, right = shapes[first], shapes[first + 1]
    return 2.0 * prod(left) * right[-1]


def peak_of(device_name: str) -> float | None:
    """FLOP/s of a GPU of this name in 16 bits; None where that is not known."""
    return next(
        (peak for name, peak in PEAK_FLOPS.items() if name in device_name), None
    )
