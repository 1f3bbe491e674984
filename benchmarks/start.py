"""Seconds from `%dist_start -n 2` to ready, each time in a fresh kernel.

`%load_ext labkit` comes first and is not counted. Ready means that every rank is in
the process group and that one all-reduce over it was right.
"""

import time

from _kernel import Kernel
from _measure import parser
from _measure import print_table
from _measure import spread

TARGET = "<= 4 s"


def main() -> None:
    args = parser(__doc__, tries=5).parse_args()
    starts, stops = [], []
    for _ in range(args.tries):
        kernel = Kernel()
        try:
            kernel.run("%load_ext labkit")
            starts.append(seconds(kernel, "%dist_start -n 2"))
            stops.append(seconds(kernel, "%dist_stop"))
        finally:
            kernel.close()
    print_table(
        f"Seconds from sending the cell to its reply, {args.tries} fresh kernels",
        ["cell", "median", "p95", "worst", "target"],
        [
            ["%dist_start -n 2", *spread(starts), TARGET],
            ["%dist_stop", *spread(stops), ""],
        ],
    )


def seconds(kernel: Kernel, code: str) -> float:
    """How long a cell takes, seen from the front end."""
    began = time.time()
    return kernel.run(code).came_at - began


if __name__ == "__main__":
    main()
