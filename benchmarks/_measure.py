"""What the benchmarks share: percentiles and small tables."""

import argparse
from collections.abc import Iterable
from collections.abc import Sequence
from statistics import median

import numpy as np


def parser(doc: str | None, **defaults: int) -> argparse.ArgumentParser:
    """An argument parser that explains itself with a script's docstring.

    Each of `defaults` is an option that takes a number: `tries=5` is `--tries 5`.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        made.add_argument(option, type=int, default=default, help=f"default: {default}")
    return made


def spread(values: Sequence[float], digits: int = 2) -> list[str]:
    """Median, 95th percentile and worst of `values`, where less is better."""
    figures = (median(values), float(np.percentile(values, 95)), max(values))
    return [f"{figure:.{digits}f}" for figure in figures]


def print_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Print rows under a header, the first column to the left, the others to the
    right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}\n")
    for number, (first, *others) in enumerate(cells):
        right = (cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *right]).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    print(flush=True)
