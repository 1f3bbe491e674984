"""`python -m tests.conformance`: runs the table and prints it."""

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from labkit import Lab

from .document import head
from .document import page
from .document import page_with
from .table import ALL_STRATEGIES
from .table import LOOPS
from .table import OPTIONS
from .table import ROW
from .table import Cell
from .table import row
from .table import run_cells
from .table import runs_in_memory
from .table import warm_up


def words(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
    parser.add_argument("--loops", type=words, default=list(LOOPS))
    parser.add_argument("--strategies", type=words, default=ALL_STRATEGIES)
    parser.add_argument("--options", type=words, default=list(OPTIONS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="every cell, one a line")
    parser.add_argument("--out", type=Path, help="the page with the whole table")
    parser.add_argument("--onto", type=Path, help="the page that gets these strategies")
    given = parser.parse_args()
    began = time.monotonic()
    cells: list[Cell] = []
    places = [
        place
        for place in ROW
        if place[0] in given.strategies and place[1] in given.options
    ]
    with runs_in_memory(), Lab(num_ranks=given.ranks, group_timeout_s=60) as lab:
        warm_up(lab)
        print(head(dict.fromkeys(strategy for strategy, _ in places)), flush=True)
        for loop in given.loops:
            found = list(run_cells(lab, loop, places))
            cells += found
            print(row(loop, found), flush=True)
            if given.json:
                with given.json.open("a") as file:
                    for cell in found:
                        print(json.dumps(asdict(cell)), file=file)
    if given.out:
        given.out.write_text(page(cells))
    if given.onto:
        given.onto.write_text(page_with(given.onto.read_text(), cells))
    print(dict(Counter(cell.kind for cell in cells)))
    print(f"{len(cells)} runs in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
