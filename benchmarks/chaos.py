"""Random faults thrown at one lab: what came back, how soon, and what was left.

In a real kernel. A training cell under a random strategy goes wrong at a random moment
on random ranks: a rank raises, dies, hangs, holds the GIL, loses a worker of its
DataLoader, or the process that draws is killed. Then `%dist_status` must tell the
truth; dead ranks are brought back; a cell must find an all-reduce right and, on ranks
that were not lost, a variable that was set before; a training run under another random
strategy must have the losses of one process. At the end nothing may be left.

Fault number N of a seed is always the same: `--seed S --first N --faults 1` repeats it.
"""

import contextlib
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from _kernel import Kernel
from _kernel import Reply
from _kernel import lab_kernel
from _measure import parser
from _measure import print_table
from _measure import spread
from torch.utils.data import TensorDataset

from labkit.host import watchdog
from labkit.models import mlp
from labkit.strategies import STRATEGIES

WAIT_S = 120.0
TIMEOUT_S = 2
"""The `--timeout` of cells that have one."""
SECOND_INTERRUPT_S = 3.0
MOMENTS = ("before", "forward", "backward", "step", "between")
MAX_STEP = 6
NUM_STEPS = 32
BATCH_SIZE = 16
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Kind:
    """A way to go wrong."""

    name: str
    code: str
    """What the ranks run that go wrong."""
    ends_by: str = "itself"
    """Or "interrupt", "two interrupts", "--timeout", "kill" (of a rank, from outside),
    or "painter" (its kill, which is to change nothing)."""
    loses: str = ""
    """What becomes of the ranks: "dead", "restarted", or "" where they stay."""
    is_of_all: bool = False
    """Whether it takes every rank, and more than one."""


# The mutex is locked twice, with the GIL held meanwhile: no signal ends that.
HOLD_THE_GIL = """
    import ctypes
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex); c.pthread_mutex_lock(mutex)"""
MISMATCH = "dist.barrier() if rank == 0 else dist.all_gather_object([0] * 99, rank)"
KILL_WORKERS = """
    import multiprocessing
    for worker in multiprocessing.active_children(): worker.kill()"""

KINDS = (
    Kind("raise", "raise ValueError('chaos')"),
    Kind("SIGKILL", "os.kill(os.getpid(), 9)", loses="dead"),
    Kind("SIGSEGV", "os.kill(os.getpid(), 11)", loses="dead"),
    Kind("os._exit", "os._exit(3)", loses="dead"),
    Kind("killed while idle", "", "kill", loses="dead"),
    Kind("mismatch, interrupt", MISMATCH, "interrupt", is_of_all=True),
    Kind("loop, interrupt", "while True: pass", "interrupt"),
    Kind("sleep, --timeout", "time.sleep(600)", "--timeout"),
    Kind("GIL held, two interrupts", HOLD_THE_GIL, "two interrupts", "restarted"),
    Kind("painter killed", "pass", "painter"),
    Kind("DataLoader worker killed", KILL_WORKERS),
)


@dataclass(frozen=True)
class Fault:
    """What is to go wrong, and when and where."""

    number: int
    kind: Kind
    strategy: str
    ranks: list[int]
    moment: str
    step: int
    delay_s: float
    """From when a rank is there to what is done to it from outside."""
    next_strategy: str

    @property
    def when(self) -> str:
        return self.moment if self.moment == "before" else f"{self.moment} {self.step}"


@dataclass(frozen=True)
class Outcome:
    """What came of a fault."""

    fault: Fault
    prompt_s: float
    """Until the prompt was back; of a rank that died idle, until that was reported."""
    next_s: float
    """Of all that it took then until a cell worked, a restart included."""
    wrong: list[str]


def ranks_of_cell(strategy: str, num_ranks: int) -> list[int]:
    """The ranks that run a training cell under a strategy."""
    if STRATEGIES[strategy].is_single:
        return [0]
    num_servers = len(STRATEGIES[strategy].server_ranks(1, num_ranks))
    return list(range(num_ranks - num_servers))


def draw(
    seed: int,
    number: int,
    num_ranks: int,
    *,
    kinds: Sequence[Kind] = KINDS,
    strategies: Sequence[str] = tuple(STRATEGIES),
) -> Fault:
    """Fault `number` of this seed."""
    chance = random.Random(f"{seed} {number}")
    kind = chance.choice(kinds)
    running = {name: ranks_of_cell(name, num_ranks) for name in strategies}
    strategy = chance.choice(
        [s for s in strategies if not (kind.is_of_all and len(running[s]) == 1)]
    )
    everyone = running[strategy]
    if kind.ends_by == "kill":
        everyone = list(range(num_ranks))
    some = sorted(chance.sample(everyone, chance.randint(1, len(everyone))))
    needs_loader = kind.code == KILL_WORKERS
    return Fault(
        number,
        kind,
        strategy,
        everyone if kind.is_of_all else some,
        chance.choice(MOMENTS[1:] if needs_loader else MOMENTS),
        chance.randint(0, MAX_STEP),
        chance.uniform(0.0, 0.5),
        chance.choice([s for s in strategies if STRATEGIES[s].technique]),
    )


DATA = f"""
generator = torch.Generator().manual_seed(1)
x = torch.randn({NUM_STEPS * BATCH_SIZE}, 8, generator=generator)
data = torch.utils.data.TensorDataset(x, x.argmax(1))
torch.manual_seed(0)
model = mlp(8, 16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

SET_UP = """%%dist
import os, signal, time
from pathlib import Path
import torch.nn.functional as F
from labkit.models import mlp
kept = [rank]
"""

NEXT = """%%dist
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == world_size, ones
assert kept == [rank], kept
"""


def bad_cell(fault: Fault, folder: Path) -> str:
    """The training cell in which it goes wrong."""
    timeout = f" --timeout {TIMEOUT_S}" if fault.kind.ends_by == "--timeout" else ""
    workers = int(fault.kind.code == KILL_WORKERS)
    loader = f"torch.utils.data.DataLoader(data, {BATCH_SIZE}, num_workers={workers})"
    if fault.strategy == "raw":
        prepared = (
            "model = torch.nn.parallel.DistributedDataParallel(model)\n"
            f"loader = {loader}"
        )
    else:
        prepared = f"model, optimizer, loader = prepare(model, optimizer, {loader})"
    return f"""%%dist_train {fault.strategy} --name chaos-{fault.number}{timeout}
import os, signal, time
from pathlib import Path
import torch.nn.functional as F
from labkit.models import mlp

def is_here():
    file = Path({str(folder)!r}, f"{fault.number}-{{rank}}")
    file.with_suffix(".new").write_text(str(time.time()))
    file.with_suffix(".new").rename(file)

def at(moment, step):
    if rank not in {fault.ranks} or (moment, step) != {(fault.moment, fault.step)}:
        return
    is_here()
    {fault.kind.code.strip()}

at("before", {fault.step})
{DATA}
{prepared}
for step, (x, y) in enumerate(loader):
    at("forward", step)
    loss = F.cross_entropy(model(x), y)
    at("backward", step)
    loss.backward()
    at("step", step)
    optimizer.step()
    at("between", step)
    optimizer.zero_grad()
"""


def check_cell(fault: Fault) -> str:
    """A training run whose losses are known."""
    return f"""%%dist_train {fault.next_strategy} --name check-{fault.number}
import torch.nn.functional as F
from labkit.models import mlp
{DATA}
fit(model, data, F.cross_entropy, optimizer=optimizer, batch_size={BATCH_SIZE},
    shuffle=False)
"""


def reference() -> list[float]:
    """The losses of `check_cell` in one process."""
    names: dict = {"torch": torch, "mlp": mlp}
    exec(DATA, names)
    data: TensorDataset = names["data"]
    model, optimizer = names["model"], names["optimizer"]
    losses = []
    for number in range(NUM_STEPS):
        x, y = data[number * BATCH_SIZE : (number + 1) * BATCH_SIZE]
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Session:
    """A kernel with a lab, at which faults are thrown."""

    def __init__(self, kernel: Kernel, num_ranks: int, folder: Path) -> None:
        self.kernel = kernel
        self.num_ranks = num_ranks
        self._folder = folder
        self._losses = reference()
        self.kernel.run("import labkit")
        self.kernel.run(SET_UP)

    def throw(self, fault: Fault) -> Outcome:
        """Let it happen, and see what comes of it."""
        wrong: list[str] = []
        if fault.kind.ends_by == "kill":
            prompt_s = self._kill_idle(fault)
        else:
            prompt_s = self._run_bad_cell(fault, wrong)
        lost = fault.ranks if fault.kind.loses else []
        dead = fault.ranks if fault.kind.loses == "dead" else []
        self._check_status(wrong, dead)
        began = time.time()
        if dead:
            said = self._run("%dist_restart", wrong).text
            numbers = [int(n) for n in re.findall(r"\d+", said.split(" restarted")[0])]
            if numbers[:1] + numbers[-1:] != [dead[0], dead[-1]]:
                wrong.append(f"%dist_restart said: {said}")
        if lost:
            ranks = ",".join(map(str, lost))
            self._run(SET_UP.replace("%%dist", f"%%dist {ranks}"), wrong)
        self._run(NEXT, wrong)
        next_s = time.time() - began
        self._check_status(wrong, [])
        self._check_training(fault, wrong)
        return Outcome(fault, prompt_s, next_s, wrong)

    def _run_bad_cell(self, fault: Fault, wrong: list[str]) -> float:
        kernel = self.kernel
        began = time.time()
        request = kernel.begin(bad_cell(fault, self._folder))
        if fault.kind.ends_by == "--timeout":  # wherever the ranks are by then
            at = began + TIMEOUT_S
        else:
            at = self._wait_for(fault)
        if fault.kind.ends_by in ("interrupt", "two interrupts"):
            time.sleep(fault.delay_s)
            at = time.time()
            kernel.manager.interrupt_kernel()
            if fault.kind.ends_by == "two interrupts":
                time.sleep(SECOND_INTERRUPT_S)
                kernel.manager.interrupt_kernel()
        elif fault.kind.ends_by == "painter":
            for process in psutil.Process(kernel.pid).children():
                if "labkit.notebook.live.render_process" in " ".join(process.cmdline()):
                    process.kill()
        reply = kernel.end(request)
        expected = "ok" if fault.kind.ends_by == "painter" else "error"
        if reply.status != expected:
            wrong.append(f"the cell ended with {reply.status}: {reply.error}")
        return reply.came_at - at

    def _wait_for(self, fault: Fault) -> float:
        """When the last rank went wrong; waits until it has."""
        files = [self._folder / f"{fault.number}-{rank}" for rank in fault.ranks]
        wait_for(lambda: all(file.exists() for file in files), f"{fault} to happen")
        return max(float(file.read_text()) for file in files)

    def _kill_idle(self, fault: Fault) -> float:
        pids = self.kernel.value("labkit.current_lab().status()['pid'].tolist()")
        time.sleep(fault.delay_s)
        at = time.time()
        for rank in fault.ranks:
            os.kill(pids[rank], signal.SIGKILL)
        wait_for(
            lambda: self._states() == self._expected(fault.ranks), "reported deaths"
        )
        return time.time() - at

    def _states(self) -> list[str]:
        return self.kernel.value("labkit.current_lab().status()['state'].tolist()")

    def _expected(self, dead: Sequence[int]) -> list[str]:
        return ["dead" if r in dead else "idle" for r in range(self.num_ranks)]

    def _check_status(self, wrong: list[str], dead: Sequence[int]) -> None:
        if (states := self._states()) != self._expected(dead):
            wrong.append(f"%dist_status says {states}, and {list(dead)} are dead")

    def _check_training(self, fault: Fault, wrong: list[str]) -> None:
        self._run(check_cell(fault), wrong)
        run = f"labkit.current_lab().find_runs(['check-{fault.number}'])[0]"
        losses = self.kernel.value(f"{run}.mean_loss()['loss'].tolist()")
        pairs = list(zip(losses, self._losses, strict=False))
        if len(losses) != NUM_STEPS or max(abs(a - b) for a, b in pairs) > TOLERANCE:
            wrong.append(f"{fault.next_strategy}: {losses}, expected {self._losses}")

    def _run(self, code: str, wrong: list[str]) -> Reply:
        reply = self.kernel.end(self.kernel.begin(code))
        if reply.status != "ok":
            wrong.append(f"{code.splitlines()[0]}: {reply.text}{reply.error}")
        return reply


def wait_for(condition: object, what: str) -> None:
    """Return once `condition()` holds; RuntimeError after `WAIT_S`."""
    assert callable(condition)
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {WAIT_S:g} s")
        time.sleep(0.02)


@contextlib.contextmanager
def session(num_ranks: int) -> Iterator[Session]:
    """A session in folders of its own; RuntimeError if it leaves anything behind."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        own = {"TMPDIR": str(folder / "tmp"), "LABKIT_RUNS": str(folder / "runs")}
        (folder / "tmp").mkdir()
        before = {key: os.environ.get(key) for key in own}
        os.environ.update(own)
        tokens: set[str] = set()
        ports: set[int] = set()
        shared = set(Path("/dev/shm").iterdir())
        try:
            start = f"%dist_start -n {num_ranks} --device cpu"
            with lab_kernel(start) as kernel:
                tokens |= tokens_of(kernel)
                yield Session(kernel, num_ranks, folder)
                pids = {
                    p.pid for token in tokens for p in watchdog.find_processes(token)
                }
                ports |= listening(pids)
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update(
                    {key: value}
                )
        left = [p for token in tokens for p in watchdog.find_processes(token)]
        folders = [*folder.glob("tmp/labkit-*")]
        segments = [
            path
            for path in set(Path("/dev/shm").iterdir()) - shared
            if any(str(pid) in path.name for pid in pids)
        ]
        still = ports & listening(None)
        if left or folders or segments or still:
            raise RuntimeError(f"left behind: {left} {folders} {segments} {still}")


def tokens_of(kernel: Kernel) -> set[str]:
    """The tokens of the labs that the kernel has started."""
    commands = [child.cmdline() for child in psutil.Process(kernel.pid).children()]
    return {command[-2] for command in commands if watchdog.__file__ in command}


def listening(pids: set[int] | None) -> set[int]:
    """The TCP ports at which these processes listen; at which any does, for None."""
    return {
        found.laddr.port
        for found in psutil.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and (pids is None or found.pid in pids)
    }


def throw_all(faults: Sequence[Fault], num_ranks: int) -> Iterator[Outcome]:
    """Throw these faults at one session, one after the other.

    RuntimeError where a fault never ends, or something is left at the end of all.
    """
    with session(num_ranks) as thrown_at:
        for fault in faults:
            try:
                yield thrown_at.throw(fault)
            except Exception as error:
                raise RuntimeError(f"{fault}: {error}") from error


def row(outcome: Outcome) -> list[str]:
    fault = outcome.fault
    ranks = ",".join(map(str, fault.ranks))
    return [
        f"{fault.number:3}",
        f"{fault.kind.name:24}",
        f"{'' if fault.kind.ends_by == 'kill' else fault.strategy:6}",
        f"{'idle' if fault.kind.ends_by == 'kill' else fault.when:10}",
        f"{ranks:5}",
        f"{outcome.prompt_s:6.2f}",
        f"{outcome.next_s:6.2f}",
        f"{fault.next_strategy:6}",
        "WRONG" if outcome.wrong else "right",
    ]


def main() -> None:
    args = parser(__doc__, faults=100, seed=0, num_ranks=2, first=0).parse_args()
    numbers = range(args.first, args.first + args.faults)
    print(
        "fault, kind, strategy, moment and step, ranks, s to the prompt, s to the next"
    )
    print("cell that worked (with %dist_restart), next strategy, all right\n")
    faults = [draw(args.seed, number, args.num_ranks) for number in numbers]
    outcomes = []
    for outcome in throw_all(faults, args.num_ranks):
        outcomes.append(outcome)
        print(*row(outcome), sep="  ", flush=True)
        for each in outcome.wrong:
            print(f"    seed {args.seed}: {outcome.fault}\n    {each}", flush=True)
    rows = []
    for name in [*(kind.name for kind in KINDS), "all"]:
        mine = [each for each in outcomes if name in (each.fault.kind.name, "all")]
        if mine:
            prompts = spread([each.prompt_s for each in mine])
            cells = spread([each.next_s for each in mine])
            right = sum(not each.wrong for each in mine)
            rows.append([name, *prompts, *cells, f"{right}/{len(mine)}"])
    print_table(
        f"{args.faults} faults, seed {args.seed}, {args.num_ranks} ranks: seconds to "
        "the prompt (median, p95, worst),\nthen until a cell worked, and how often all "
        "was right; nothing was left at the end",
        ["fault", "prompt", "p95", "worst", "next", "p95", "worst", "right"],
        rows,
    )
    if any(each.wrong for each in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
