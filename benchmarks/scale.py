"""The cost of a lab as ranks are added: start, memory, cells, copies, failures, end.

For each number of ranks (`--ranks`), in a fresh kernel: seconds from
sending a cell to its reply; the processes beside the kernel, and the memory of all of
them (PSS: what several share counts once). A failure is one rank that raises, and an
interrupt comes, while the others sit in a collective.
"""

import os
import signal
import time
from statistics import median

import psutil
from _kernel import Kernel
from _measure import parser
from _measure import print_table

FAILURE = "%%dist\nif rank == 0: 1 / 0\ndist.barrier()"
WAIT = "%%dist\nif rank > 0: dist.barrier()\nelse:\n    import time; time.sleep(60)"
NEXT = "%%dist\ndist.barrier()"
LARGE = "import torch; large = torch.zeros(25_000_000)"
HEADER = [
    *("ranks", "start", "processes", "GiB", "trivial cell, ms", "push 100 MB"),
    *("raise", "interrupt", "next cell", "stop"),
]


def main() -> None:
    made = parser(__doc__, cells=30, tries=3)
    made.add_argument("--ranks", default="2,8,16", help="default: 2,8,16")
    args = made.parse_args()
    rows = [row(int(n), args.cells, args.tries) for n in args.ranks.split(",")]
    print_table("Seconds, but for what says otherwise; medians", HEADER, rows)


def row(num_ranks: int, cells: int, tries: int) -> list[str]:
    kernel = Kernel()
    try:
        kernel.run("%load_ext labkit")
        start = seconds(kernel, f"%dist_start -n {num_ranks}")
        num_processes, num_bytes = processes(kernel.pid)
        trivial = [seconds(kernel, "%%dist\nx = 1") for _ in range(cells)]
        kernel.run(LARGE)
        push = seconds(kernel, "%dist_push large")
        raised, interrupted, following = [], [], []
        for _ in range(tries):
            raised.append(seconds(kernel, FAILURE, fails=True))
            following.append(seconds(kernel, NEXT))
            interrupted.append(interrupt(kernel, num_ranks))
            following.append(seconds(kernel, NEXT))
        stop = seconds(kernel, "%dist_stop")
    finally:
        kernel.close()
    return [
        str(num_ranks),
        f"{start:.1f}",
        str(num_processes),
        f"{num_bytes / 2**30:.1f}",
        f"{1e3 * median(trivial):.0f}",
        *(
            f"{each:.2f}"
            for each in (push, median(raised), median(interrupted), median(following))
        ),
        f"{stop:.1f}",
    ]


def seconds(kernel: Kernel, code: str, *, fails: bool = False) -> float:
    """How long a cell takes, seen from the front end."""
    began = time.time()
    reply = kernel.end(kernel.begin(code))
    if (reply.status == "error") != fails:
        raise RuntimeError(f"{code}\nended with {reply.status}: {reply.error}")
    return reply.came_at - began


def interrupt(kernel: Kernel, num_ranks: int) -> float:
    """From an interrupt to the prompt."""
    request = kernel.begin(WAIT)
    time.sleep(1 + num_ranks / 16)  # until all others are in the collective
    began = time.time()
    os.kill(kernel.pid, signal.SIGINT)
    return kernel.end(request).came_at - began


def processes(pid: int) -> tuple[int, int]:
    """How many a kernel has started, and the bytes that they hold together."""
    found = psutil.Process(pid).children(recursive=True)
    return len(found), sum(each.memory_full_info().pss for each in found)


if __name__ == "__main__":
    main()
