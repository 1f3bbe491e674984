"""Seconds from a failure to the prompt, and whether the next cell works, two ranks.

In a real kernel. A cell fails, or is interrupted as the stop button does it; then a
cell checks on every rank that a variable set before is still there and that an
all-reduce is right. Last, the kernel itself goes, while its lab is idle and while a
cell runs: how long until no process of the lab is left, and its folder is gone.
"""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
from _kernel import Kernel
from _kernel import lab_kernel
from _measure import parser
from _measure import print_table
from _measure import spread

from labkit.notebook import watchdog

START = "%dist_start -n 2 --device cpu"
SETTLE_S = 0.7
"""How long a cell has run when it fails or is stopped: every rank is where it waits."""


@dataclass(frozen=True)
class Case:
    """A way for a cell to end badly."""

    name: str
    code: str
    is_interrupted: bool = False


FAIL = f"time.sleep({SETTLE_S}); failed_at = time.time(); raise ValueError(rank)"
ENTER = "dist.all_reduce(torch.ones(1))"

CASES = [
    Case("one raises, one in all_reduce", f"if rank == 0: {FAIL}\n{ENTER}"),
    Case("one raises, one sleeps", f"if rank == 0: {FAIL}\ntime.sleep(60)"),
    Case("every rank raises", FAIL),
    Case("interrupt, Python loop", "while True: sum(range(1000))", True),
    Case(
        "interrupt, all_reduce against barrier",
        f"if rank == 0: {ENTER}\nelse: dist.barrier()",
        True,
    ),
    Case(
        "interrupt, one in all_reduce, one sleeps",
        f"if rank == 0: {ENTER}\ntime.sleep(60)",
        True,
    ),
]

SET_UP = "%%dist\nimport time\nkept = [rank]"
NEXT = """%%dist
assert kept == [rank], kept
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == world_size, ones
"""

# The same for the end of a kernel: what ends it, seen from a front end.
ENDINGS: dict[str, Callable[[Kernel], None]] = {
    "SIGKILL": lambda kernel: os.kill(kernel.pid, signal.SIGKILL),
    "restart": lambda kernel: kernel.manager.restart_kernel(),
    "shutdown": lambda kernel: kernel.manager.shutdown_kernel(),
}


def main() -> None:
    args = parser(__doc__, tries=20, kernel_tries=5).parse_args()
    rows = []
    with lab_kernel(START) as kernel:
        kernel.run(SET_UP)
        kernel.run(NEXT)
        for case in CASES:
            tried = [try_case(kernel, case) for _ in range(args.tries)]
            prompts, cells, fine = zip(*tried, strict=True)
            whole = f"{sum(fine)}/{args.tries}"
            rows.append([case.name, *spread(prompts), *spread(cells), whole])
    print_table(
        f"A cell ends badly, {args.tries} tries: seconds to the prompt (median, p95, "
        "worst),\nseconds of the next cell, and how often it was right",
        ["case", "prompt", "p95", "worst", "next", "p95", "worst", "right"],
        rows,
    )
    rows = []
    for name, end in ENDINGS.items():
        for is_busy in (False, True):
            tried = [try_ending(end, is_busy) for _ in range(args.kernel_tries)]
            case = f"{name}, {'a cell runs' if is_busy else 'idle'}"
            rows.append([case, *spread(tried)])
    print_table(
        f"The kernel ends, {args.kernel_tries} tries: seconds until no process and no "
        "folder is left",
        ["case", "median", "p95", "worst"],
        rows,
    )


def try_case(kernel: Kernel, case: Case) -> tuple[float, float, bool]:
    """Seconds to the prompt, seconds of the next cell, and whether that was right."""
    request = kernel.begin(f"%%dist\n{case.code}")
    if case.is_interrupted:
        time.sleep(SETTLE_S)
        failed_at = time.time()
        kernel.manager.interrupt_kernel()
    ended = kernel.end(request)
    if ended.status != "error":
        raise RuntimeError(f"{case.name}: the cell ended with {ended.status}")
    began = time.time()
    after = kernel.end(kernel.begin(NEXT))
    if after.status != "ok":
        print(f"{case.name}: {after.text}{after.error}")
    if not case.is_interrupted:
        kernel.run("%dist_pull failed_at")
        failed_at = kernel.value("failed_at")
    return ended.came_at - failed_at, after.came_at - began, after.status == "ok"


def try_ending(end: Callable[[Kernel], None], is_busy: bool) -> float:
    """Seconds from the end of a kernel to that of the last trace of its lab."""
    kernel = Kernel()
    try:
        kernel.run("%load_ext labkit")
        kernel.run(START)
        if is_busy:
            kernel.begin("%%dist\nwhile True: sum(range(1000))")
            time.sleep(SETTLE_S)
        keeper, token, folder = traces(kernel)
        with ThreadPoolExecutor() as pool:
            gone = pool.submit(wait_until_gone, keeper, token, folder, time.time())
            end(kernel)
            return gone.result()
    finally:
        kernel.close()


def traces(kernel: Kernel) -> tuple[psutil.Process, str, Path]:
    """The lab's watchdog, and the token and folder that it was told of."""
    for process in psutil.Process(kernel.pid).children():
        command = process.cmdline()
        if watchdog.__file__ in command:
            token, folder = command[-2:]
            assert watchdog.find_processes(token), "the lab has no processes"
            assert Path(folder).is_dir(), folder
            return process, token, Path(folder)
    raise RuntimeError("the kernel has no watchdog")


def wait_until_gone(
    keeper: psutil.Process, token: str, folder: Path, since: float
) -> float:
    """Seconds from `since` until nothing is left; RuntimeError after a minute."""
    while time.time() - since < 60:
        # The watchdog outlives all the others: looking for those costs more.
        if not is_alive(keeper):
            left = watchdog.find_processes(token)
            if left or folder.exists():
                raise RuntimeError(f"left behind: {left} {folder}")
            return time.time() - since
        time.sleep(0.02)
    raise RuntimeError(f"after a minute: {watchdog.find_processes(token)}")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
