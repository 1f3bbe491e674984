"""A trivial cell on two ranks: `%%dist` against bare ipyparallel's `%%px`.

Both clusters stand side by side in one kernel; the two magics take turns, and are
timed inside the kernel, so that the front end's round trip is not counted.
"""

from statistics import median

from _kernel import lab_kernel
from _measure import parser
from _measure import print_table
from _measure import spread

TARGET = 1.3

START_BARE = """
import logging
import ipyparallel
bare = ipyparallel.Cluster(n=2, log_level=logging.ERROR)
client = bare.start_and_connect_sync(activate=True)
"""

# Every other round begins with the other magic: neither always runs second.
MEASURE = """
import time
magics = {{"dist": "", "px": "--no-stream"}}
milliseconds = {{name: [] for name in magics}}
for number in range({warm_up} + {cells}):
    for name in sorted(magics, reverse=number % 2):
        began = time.perf_counter()
        get_ipython().run_cell_magic(name, magics[name], "x = 1")
        if number >= {warm_up}:
            milliseconds[name].append(1000 * (time.perf_counter() - began))
"""

STOP_BARE = """
client.close()
bare.stop_cluster_sync()
"""


def main() -> None:
    args = parser(__doc__, cells=200, warm_up=20).parse_args()
    with lab_kernel() as kernel:
        kernel.run(START_BARE)
        try:
            kernel.run(MEASURE.format(cells=args.cells, warm_up=args.warm_up))
            taken = kernel.value("milliseconds")
        finally:
            kernel.run(STOP_BARE)
    print_table(
        f"Milliseconds for the cell `x = 1` on 2 ranks, {args.cells} times each",
        ["magic", "median", "p95", "worst"],
        [
            ["%%dist", *spread(taken["dist"])],
            ["%%px --no-stream", *spread(taken["px"])],
        ],
    )
    ratio = median(taken["dist"]) / median(taken["px"])
    print(f"ratio of the medians: {ratio:.2f} (target: at most {TARGET})")


if __name__ == "__main__":
    main()
