"""What trouble with a host costs: to the prompt, to a cell that works, what is kept.

Three ranks, one on each of three hosts, in a cell that all-reduces without end; a
second after it has begun, something happens to the last host or its rank. The hosts are
network namespaces (`tests/hosts/namespaces.py`), which takes root, iproute2 and
OpenSSH's server. *To the prompt* is from the fault to the end of the cell; then the
trouble ends, where it can, and *to a cell that works* is `lab.restart()` and a cell
with a barrier. *Kept* are the ranks that have their variables then.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from _measure import parser
from _measure import print_table

from labkit import Lab
from labkit import RankError

sys.path.append(str(Path(__file__).parents[1] / "tests" / "hosts"))

import namespaces

HOSTS = "lk1:1,lk2:1,lk4:1"
ENDLESS = "while True: dist.all_reduce(torch.ones(1))"
LOOP = """
import time
until, num_turns, is_over = time.monotonic() + {seconds}, 0, torch.zeros(1)
while not is_over:
    is_over = torch.tensor([float(time.monotonic() > until)])
    dist.all_reduce(is_over)
    num_turns += 1
"""
FAILS = """
import time
until = time.monotonic() + 1
while True:
    dist.all_reduce(torch.ones(1))
    if rank == 2 and time.monotonic() > until: 1 / 0
"""
TURNS_S = 5


def main() -> None:
    made = parser(__doc__, tries=1)
    asked = made.parse_args()
    if reason := namespaces.why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["LABKIT_RUNS"] = str(folder / "runs")
        with namespaces.hosts(folder, 4) as found:
            os.environ["PATH"] = os.pathsep.join([f"{place}/bin", os.environ["PATH"]])
            last = found[3]
            rows = [
                row
                for _ in range(asked.tries)
                for row in (
                    ends("a rank raises", last, None, FAILS),
                    ends("a rank is killed (SIGKILL)", last, None),
                    ends("the host dies", last, last.die),
                    ends("its link is cut for good", last, partial(cut, last)),
                    goes_on("its link is down for 5 s", last, partial(blink, last)),
                    goes_on("half of its packets are lost", last, loses(last)),
                    goes_on("200 ms each way", last, delays(last)),
                    goes_on("10 Mbit/s", last, throttles(last)),
                )
            ]
    header = ["fault", "to the prompt", "to a cell that works", "kept", "note"]
    print_table("Seconds: three ranks on three hosts, over ssh", header, rows)


def cut(host: namespaces.Namespace) -> None:
    host.set_link("down")


def blink(host: namespaces.Namespace) -> None:
    host.set_link("down")
    time.sleep(5)
    host.set_link("up")


def loses(host: namespaces.Namespace) -> Callable[[], None]:
    return partial(host.set_wire, loss=0.5)


def delays(host: namespaces.Namespace) -> Callable[[], None]:
    return partial(host.set_wire, delay_s=0.2)


def throttles(host: namespaces.Namespace) -> Callable[[], None]:
    return partial(host.set_wire, bytes_per_s=1.25e6)


def ends(
    name: str,
    host: namespaces.Namespace,
    fault: Callable[[], None] | None,
    cell: str = ENDLESS,
) -> list[str]:
    """A row of a fault that ends the cell."""
    with Lab(launcher="ssh", hosts=HOSTS) as lab:
        lab.run("kept = rank")
        if fault is None:
            pid = int(lab.status()["pid"].iloc[2])
            fault = partial(os.kill, pid, signal.SIGKILL)
        happened = [0.0]
        timer = threading.Timer(1, happen, [fault, happened])
        if cell is ENDLESS:
            timer.start()
        else:
            happened[0] = time.monotonic() + 1  # it raises then, by itself
        said = ""
        try:
            lab.run(cell)
        except RankError as error:
            said = str(error).splitlines()[0]
        prompt = time.monotonic() - happened[0]
        heal(host)
        return [name, f"{prompt:.1f}", *works_again(lab), said[:90]]


def goes_on(
    name: str, host: namespaces.Namespace, fault: Callable[[], None]
) -> list[str]:
    """A row of a fault that a cell may outlast: how many all-reduces it makes in 5 s,
    beside those of a whole link."""
    with Lab(launcher="ssh", hosts=HOSTS) as lab:
        lab.run("kept = rank\n" + LOOP.format(seconds=TURNS_S))
        whole = lab.pull("num_turns", 0)
        timer = threading.Timer(0.5, fault)
        timer.start()
        said, began = "", time.monotonic()
        try:
            lab.run(LOOP.format(seconds=TURNS_S), timeout=90)
        except RankError as error:
            said = str(error).splitlines()[0]
        took = time.monotonic() - began - TURNS_S
        timer.join()
        if not said:
            said = f"{lab.pull('num_turns', 0)} all-reduces in place of {whole}"
        heal(host)
        return [name, f"{took:.1f} more", *works_again(lab), said[:90]]


def happen(fault: Callable[[], None], when: list[float]) -> None:
    when[0] = time.monotonic()
    fault()


def heal(host: namespaces.Namespace) -> None:
    host.set_wire()
    host.set_link("up")


def works_again(lab: Lab) -> list[str]:
    """How long it takes until a cell works, and which ranks have their variables."""
    began = time.monotonic()
    lab.restart()
    lab.run("dist.barrier()\nhas = 'kept' in globals()")
    seconds = time.monotonic() - began
    kept = [rank for rank, has in enumerate(lab.pull("has", "all")) if has]
    return [f"{seconds:.1f}", ", ".join(map(str, kept))]


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
