"""Seconds from a failure to the prompt, and until the next cell works, two ranks.

In a real kernel. A cell fails, or is interrupted as the stop button does it; where it
cost a rank, `%dist_restart` brings that back. Then a cell checks on every rank that was
not lost that a variable set before is still there, and on all that an all-reduce is
right. Last, the kernel itself goes, while its lab is idle and while a cell runs: how
long until no process of the lab is left, and its folder is gone.
"""

import os
import re
import signal
import tempfile
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
from chaos import HOLD_THE_GIL

from labkit.host import watchdog

START = "%dist_start -n 2 --device cpu"
SETTLE_S = 0.7
"""How long a cell has run when it fails or is stopped: every rank is where it waits."""
SECOND_INTERRUPT_S = 1.0


@dataclass(frozen=True)
class Case:
    """A way for a cell to end badly."""

    name: str
    code: str
    """{fail}, {die} and {crash} stand for what does it, and notes when."""
    num_interrupts: int = 0
    loses: int | None = None
    """The rank that is a new process after it."""
    magic: str = "%%dist"

    @property
    def is_a_death(self) -> bool:
        """Whether `%dist_restart` has to bring the lost rank back."""
        return self.loses is not None and not self.num_interrupts


NOTE = "open({clock!r}, 'w').write(str(time.time()))"
DO = {
    "fail": f"time.sleep({SETTLE_S}); {NOTE}; raise ValueError(rank)",
    "die": f"time.sleep({SETTLE_S}); {NOTE}; os.kill(os.getpid(), 9)",
    "crash": f"time.sleep({SETTLE_S}); {NOTE}; os.kill(os.getpid(), 11)",
}
ENTER = "dist.all_reduce(torch.ones(1))"
IN_BACKWARD = """
import torch.nn.functional as F
from labkit.data import digits
from labkit.models import mlp

def fail_once(gradient, taken=[]):
    taken.append(gradient)
    if rank == 1 and len(taken) == 5:
        {fail}

model = mlp()
sgd = torch.optim.SGD(model.parameters(), lr=0.02)
model, sgd, loader = prepare(model, sgd, digits(), batch_size=64)
for x, y in loader:
    scores = model(x)
    scores.register_hook(fail_once)
    F.cross_entropy(scores, y).backward()
    sgd.step()
    sgd.zero_grad()
"""
TRAIN = "%%dist_train {} --no-live"

CASES = [
    Case("one raises, one in all_reduce", f"if rank == 0: {{fail}}\n{ENTER}"),
    Case("one raises, one sleeps", "if rank == 0: {fail}\ntime.sleep(60)"),
    Case("every rank raises", "{fail}"),
    *(
        Case(f"one raises in backward, {name}", IN_BACKWARD, magic=TRAIN.format(name))
        for name in ("ddp", "fsdp", "zero3")
    ),
    Case("interrupt, Python loop", "while True: sum(range(1000))", 1),
    Case(
        "interrupt, all_reduce against barrier",
        f"if rank == 0: {ENTER}\nelse: dist.barrier()",
        1,
    ),
    Case(
        "interrupt, one in all_reduce, one sleeps",
        f"if rank == 0: {ENTER}\ntime.sleep(60)",
        1,
    ),
    Case(
        "interrupt, new_group against recv",
        "dist.new_group([0, 1]) if rank == 0 else dist.recv(torch.ones(1), 0)",
        1,
    ),
    Case(
        "two interrupts, the GIL is held",
        f"if rank == 1:{HOLD_THE_GIL}\ntime.sleep(60)",
        2,
        loses=1,
    ),
    Case(
        "SIGKILL of rank 1, the other sleeps",
        "if rank == 1: {die}\ntime.sleep(60)",
        loses=1,
    ),
    Case(
        "SIGKILL of rank 0, the other in all_reduce",
        f"if rank == 0: {{die}}\n{ENTER}",
        loses=0,
    ),
    Case(
        "SIGSEGV of rank 1, the other in all_reduce",
        f"if rank: {{crash}}\n{ENTER}",
        loses=1,
    ),
]

SET_UP = "%%dist\nimport os, time\nkept = [rank]"
NEXT = """%%dist
import os, time
if rank == {lost}: kept = [rank]
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
    arguments = parser(__doc__, tries=20, kernel_tries=5)
    arguments.add_argument(
        "--only",
        default="",
        help="a regular expression: cells whose name it finds, and no kernels",
    )
    args = arguments.parse_args()
    cases = [case for case in CASES if re.search(args.only, case.name)]
    if not cases:
        arguments.error(f"no case's name has {args.only!r} in it")
    with tempfile.TemporaryDirectory() as runs:
        os.environ["LABKIT_RUNS"] = runs  # of the kernels, which inherit it
        failures_of_cells(cases, args.tries)
        if not args.only:
            ends_of_kernels(args.kernel_tries)


def failures_of_cells(cases: list[Case], num_tries: int) -> None:
    with lab_kernel(START) as kernel:
        kernel.run(SET_UP)
        kernel.run(NEXT.format(lost=None))
        rows = [row(kernel, case, num_tries) for case in cases]
    print_table(
        f"A cell ends badly, {num_tries} tries: seconds to the prompt (median, p95, "
        "worst),\nseconds from there until a cell has worked, %dist_restart included "
        "where a rank\ndied, and how often it was right",
        ["case", "prompt", "p95", "worst", "next", "p95", "worst", "right"],
        rows,
    )


def ends_of_kernels(num_tries: int) -> None:
    rows = []
    for name, end in ENDINGS.items():
        for is_busy in (False, True):
            tried = [try_ending(end, is_busy) for _ in range(num_tries)]
            case = f"{name}, {'a cell runs' if is_busy else 'idle'}"
            rows.append([case, *spread(tried)])
    print_table(
        f"The kernel ends, {num_tries} tries: seconds until no process and no "
        "folder is left",
        ["case", "median", "p95", "worst"],
        rows,
    )


def row(kernel: Kernel, case: Case, num_tries: int) -> list[str]:
    tried = [try_case(kernel, case) for _ in range(num_tries)]
    prompts, cells, fine = zip(*tried, strict=True)
    whole = f"{sum(fine)}/{num_tries}"
    found = [case.name, *spread(prompts), *spread(cells), whole]
    print("  ".join(found), flush=True)  # the whole table takes long
    return found


def try_case(kernel: Kernel, case: Case) -> tuple[float, float, bool]:
    """Seconds to the prompt, seconds until a cell has worked, and whether it did."""
    with tempfile.NamedTemporaryFile() as clock:
        code = case.code
        for name, text in DO.items():
            code = code.replace(f"{{{name}}}", text.format(clock=clock.name))
        request = kernel.begin(f"{case.magic}\n{code}")
        for number in range(case.num_interrupts):
            time.sleep(SECOND_INTERRUPT_S if number else SETTLE_S)
            if number == 0:
                Path(clock.name).write_text(str(time.time()))
            kernel.manager.interrupt_kernel()
        ended = kernel.end(request)
        failed_at = float(Path(clock.name).read_text())
    was_interrupted = ended.error.startswith("Interrupted")
    is_lost = "restarted" in ended.error
    if ended.status != "error" or was_interrupted != bool(case.num_interrupts):
        raise RuntimeError(f"{case.name}: {ended.status}, {ended.error}")
    if is_lost and case.loses is None:
        print(f"{case.name}: a rank was lost\n{ended.text}{ended.error}")
        kernel.run(SET_UP)
    began = time.time()
    if case.is_a_death:
        kernel.run("%dist_restart")
    after = kernel.end(kernel.begin(NEXT.format(lost=case.loses)))
    if after.status != "ok":
        print(f"{case.name}: {after.text}{after.error}")
    is_right = after.status == "ok" and not (is_lost and case.loses is None)
    return ended.came_at - failed_at, after.came_at - began, is_right


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
    """The lab's watchdog, and the token and folder that it was given."""
    for process in psutil.Process(kernel.pid).children():
        command = process.cmdline()
        if watchdog.__file__ in command:
            token, folder = process.environ()[watchdog.WATCHED_VARIABLE], command[-1]
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
