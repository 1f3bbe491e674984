"""How much memory of a kernel (RSS) a long history takes.

For each phase, the memory held at its end and its peak: while records arrive, while the
run ends and is written to disk, and while another kernel loads it.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

import numpy as np
import psutil
from _measure import parser
from _measure import print_table

from labkit.notebook.history.collector import Collector
from labkit.notebook.runs import persistence
from labkit.notebook.runs.catalog import load_run
from labkit.notebook.runs.run import Run
from labkit.records import RECORD
from labkit.records import Batch
from labkit.records import Outcome

COLUMNS = ["ranks x records", "while it records", "peak", "its end", "peak"]
COLUMNS += ["load_run", "peak"]
BATCH = 1000


def main() -> None:
    made = parser(__doc__, records=4_000_000)
    made.add_argument("--here", help="record or load, with the number of ranks")
    args = made.parse_args()
    if args.here:
        what, num_ranks = args.here.split()
        print(*{"record": record, "load": load}[what](int(num_ranks), args.records))
        return
    rows = []
    for num_ranks in (1, 8):
        with tempfile.TemporaryDirectory() as folder:
            os.environ[persistence.FOLDER_VARIABLE] = folder
            row = [f"{num_ranks} x {args.records // num_ranks:,}"]
            for what in ("record", "load"):
                command = [sys.executable, __file__, "--records", str(args.records)]
                command += ["--here", f"{what} {num_ranks}"]
                row += subprocess.check_output(command, text=True).split()
            rows.append(row)
    print_table(f"MB of a history of {args.records:,} records", COLUMNS, rows)


def record(num_ranks: int, num_records: int) -> list[int]:
    """A run with one metric that comes in batches, as from ranks."""
    run = Run("run-1", "ddp", "", Collector(range(num_ranks)))
    devices = ["cpu"] * num_ranks
    persistence.begin(run, seed=0, devices=devices, backend="gloo", config={})
    each = num_records // num_ranks

    def take() -> None:
        rng = np.random.default_rng(0)
        for begin in range(0, each, BATCH):
            for rank in range(num_ranks):
                records = np.ones(min(BATCH, each - begin), RECORD)
                records["step"] = np.arange(begin, begin + len(records)) + 1
                records["seconds"] = 0.002 * records["step"]
                records["value"] = rng.random(len(records))
                batch = Batch(begin, ["(unwritten)", "loss"], records)
                run.collector.add(rank, batch)
            run.collector.curves.update()

    outcomes = [Outcome(rank, "ok", num_records=each) for rank in range(num_ranks)]
    before = rss()
    return [
        *grown(take, before),
        *grown(lambda: persistence.end(run, "finished", outcomes), before),
    ]


def load(num_ranks: int, num_records: int) -> list[int]:
    kept: list[Run] = []
    found = grown(lambda: kept.append(load_run("run-1")), rss())
    assert sum(kept[0].collector.num_records.values()) == num_records
    return found


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def grown(do: Callable[[], object], before: int) -> list[int]:
    """MB over `before` after it, and at most while it was done."""
    seen, is_done = [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.002):
            seen.append(rss())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        do()
    finally:
        is_done.set()
        watching.join()
    after = rss()
    return [round((found - before) / 1e6) for found in (after, max(*seen, after))]


if __name__ == "__main__":
    main()
