"""Runs every peer through every row, in turns, and gathers the figures."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import latency
import log
import psutil
from _kernel import Kernel

from peers import cells
from peers import gpu
from peers import machine
from peers.jupyter_distributed import JupyterDistributed
from peers.lab import Labkit
from peers.launcher import NotebookLauncher
from peers.monarch import Monarch
from peers.nbdistributed import NbDistributed
from peers.px import IPyParallel
from peers.rows import NEXT_LIMIT_S
from peers.rows import WHAT_FAILS
from peers.session import Ended
from peers.session import NotThereError
from peers.session import Session
from peers.torchrun import Torchrun

SESSIONS: dict[str, type[Session]] = {
    each.name: each
    for each in (
        *(Labkit, IPyParallel, Monarch, NbDistributed, JupyterDistributed),
        *(NotebookLauncher, Torchrun),
    )
}
CELL_LIMIT_S = 60.0
CAUSE_LIMIT_S = 15.0
FAILURE_LIMIT_S = 5.0
"""A failed cell that has not ended by then hangs."""


@dataclass(frozen=True)
class Plan:
    """How much of it."""

    starts: int
    rounds: int
    cells: int
    """Trivial cells in a round."""
    steps: dict[int, int]
    """Milliseconds of a step -> how many steps."""
    strategies: tuple[str, ...]
    failures: tuple[str, ...]
    """Of `WHAT_FAILS`."""
    sizes: tuple[int, ...]
    """Numbers of ranks besides 2."""
    latency_s: int


FULL = Plan(
    starts=2,
    rounds=2,
    cells=20,
    steps={2: 699, 10: 199},
    strategies=tuple(cells.BY_HAND),
    failures=tuple(WHAT_FAILS),
    sizes=(8, 16),
    latency_s=6,
)
QUICK = Plan(
    starts=1,
    rounds=1,
    cells=10,
    steps={2: 299},
    strategies=("",),
    failures=("raise",),
    sizes=(),
    latency_s=3,
)


class Figures:
    """What was measured, by row and peer."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, dict[str, Any]]] = {}

    def add(self, row: str, peer: str, value: float) -> None:
        values = self._of(row, peer).setdefault("values", [])
        values.append(float(f"{value:.4g}"))

    def say(self, row: str, peer: str, words: str) -> None:
        """What stands in place of a number."""
        self._of(row, peer)["text"] = words

    def explain(self, row: str, peer: str, reason: str) -> None:
        """Why there is no number."""
        self._of(row, peer)["none"] = reason

    def hangs(self, row: str, peer: str, limit_s: float) -> None:
        self._of(row, peer)["hangs"] = limit_s

    @contextlib.contextmanager
    def noting(self, peer: str, *rows: str) -> Iterator[None]:
        """Keep for the table why a peer has no figure in these rows."""
        try:
            yield
        except NotThereError as error:
            reason = str(error)
        except TimeoutError as error:
            reason = f"did not end: {error}"
        except (RuntimeError, ValueError, OSError, psutil.Error) as error:
            reason = f"failed: {' '.join(str(error).split())[-160:]}"
        else:
            return
        for row in rows:
            self.explain(row, peer, reason)

    def _of(self, row: str, peer: str) -> dict[str, Any]:
        return self.rows.setdefault(row, {}).setdefault(peer, {})


class Bench:
    """The sessions that are open, and what they have given."""

    def __init__(self, names: list[str], plan: Plan) -> None:
        self.names, self.plan = names, plan
        self.figures = Figures()
        self.sessions: dict[str, Session] = {}
        self.began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        described = machine.described([SESSIONS[name] for name in self.names])
        limits = machine.limits()
        try:
            self.say("start")
            self.starts()
            for session in self.turns(0):
                self.warm_up(session)
            for number in range(self.plan.rounds):
                self.say(f"round {number + 1} of {self.plan.rounds}")
                self.round(number)
            self.say("memory")
            for session in self.turns(0):
                self.memory(session)
            self.say("records")
            self.records()
            for kind in self.plan.failures:
                for session in self.turns(0):
                    self.say(f"{kind}, {session.name}")
                    self.failure(session, kind)
            self.close()
            for size in self.plan.sizes:
                self.say(f"{size} ranks")
                for name in self.names:
                    self.say(f"  {name}")
                    self.at_size(name, size)
            if num_gpus := int(machine.printed(sys.executable, gpu.COUNT)):
                self.say("GPT-2 on GPUs")
                self.on_gpus(num_gpus)
        finally:
            self.close()
        described["load_after"] = machine.load()
        described["seconds"] = round(time.monotonic() - self.began)
        return {"machine": described, "limits": limits, "rows": self.figures.rows}

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {what}", file=sys.stderr)

    def turns(self, number: int) -> list[Session]:
        """There and back again, so that a slow drift of the machine cancels out."""
        found = list(self.sessions.values())
        return found if number % 2 == 0 else found[::-1]

    def close(self) -> None:
        for name in list(self.sessions):
            self.sessions.pop(name).close()

    # ---- rows ----

    def starts(self) -> None:
        """Start every peer, as often as planned; the last ones stay."""
        for number in range(self.plan.starts):
            self.close()
            names = self.names if number % 2 == 0 else self.names[::-1]
            for name in names:
                self.say(f"  {name}")
                if session := self.started(name, 2):
                    self.sessions[name] = session
        ordered = {n: self.sessions[n] for n in self.names if n in self.sessions}
        self.sessions = ordered

    def started(self, name: str, num_ranks: int) -> Session | None:
        session = SESSIONS[name](num_ranks)
        row = f"start_{num_ranks}"
        with self.figures.noting(name, row):
            session.open()
            self.figures.add(row, name, session.start())
            return session
        session.close()
        return None

    def warm_up(self, session: Session) -> None:
        """Import what a training cell needs, where ranks stay: that is not edited."""
        if session.keeps_state:
            with self.figures.noting(session.name, "edit"):
                edit(session, 0)

    def round(self, number: int) -> None:
        """A turn of every peer at every row of a warm session."""
        self.say("  trivial cells")
        for session in self.turns(number):
            self.trivial(session, "cell_2")
        self.say("  edit to first step")
        for session in self.turns(number):
            with self.figures.noting(session.name, "edit"):
                self.figures.add("edit", session.name, edit(session, number + 1))
        for size in (1, 100):
            self.say(f"  push and pull of {size} MB")
            for verb in ("push", "pull"):
                for session in self.turns(number):
                    row = f"{verb}_{size}"
                    with self.figures.noting(session.name, row):
                        seconds = getattr(session, verb)(size, CELL_LIMIT_S)
                        self.figures.add(row, session.name, seconds)
        for strategy in self.plan.strategies:
            self.say(f"  training, {strategy or 'DDP by hand'}")
            for session in self.turns(number):
                if not strategy or session.has_strategies:
                    self.train(session, strategy)

    def train(self, session: Session, strategy: str) -> None:
        """Loops with steps of all sizes, each in a cell. Where a cell starts ranks of
        its own they are all in one: a start takes longer than a loop."""
        sizes = list(self.plan.steps)
        for some in [[size] for size in sizes] if session.keeps_state else [sizes]:
            rows = [f"{strategy or 'steps'}_{size}" for size in some]
            steps = {cells.SIZES[size]: self.plan.steps[size] for size in some}
            with self.figures.noting(session.name, *rows):
                rates = rates_of(session, steps, strategy)
                for row, rate in zip(rows, rates, strict=True):
                    self.figures.add(row, session.name, rate)

    def trivial(self, session: Session, row: str) -> None:
        """A cell that does nothing; one where it starts ranks of its own."""
        with self.figures.noting(session.name, row):
            for _ in range(self.plan.cells if session.keeps_state else 1):
                began = time.time()
                ended = session.run("x = 1", CELL_LIMIT_S)
                if ended.is_error:
                    raise RuntimeError(ended.text)
                self.figures.add(row, session.name, ended.at - began)

    def memory(self, session: Session) -> None:
        with self.figures.noting(session.name, "memory_rank"):
            session.forget()
            go = session.folder / "go"
            go.unlink(missing_ok=True)
            code = cells.show_and_wait(session.folder, go, 20)
            request = session.begin(code)
            ranks = set(session.noted("pid", CELL_LIMIT_S))
            pss = {p.pid: p.memory_full_info().pss / 1e6 for p in session.processes()}
            go.touch()
            session.end(request, CELL_LIMIT_S)
            add, name = self.figures.add, session.name
            add("memory_rank", name, sum(pss[pid] for pid in ranks) / len(ranks))
            add("memory_all", name, sum(pss.values()))
            others = set(pss) - ranks
            if session.driver_pid is None:
                self.figures.explain("memory_kernel", name, "has no kernel")
            else:
                add("memory_kernel", name, pss[session.driver_pid])
                others -= {session.driver_pid}
            add("processes", name, len(others))

    def records(self) -> None:
        """What a record costs labkit, and how long it takes to the picture."""
        session = self.sessions.get("labkit")
        if not isinstance(session, Labkit):
            return
        with self.figures.noting(session.name, "log_cost"):
            session.forget()
            note = cells.NOTE.format(folder=str(session.folder))
            code = log.CELL.format(calls=2000)
            middle = "sorted(costs['float'])[1000]"
            code = f"{code}\n{note}\nnote('cost', {middle})"
            ended = session.run(code, CELL_LIMIT_S, strategy="")
            if ended.is_error:
                raise RuntimeError(ended.text)
            for cost in session.noted("cost", 1):
                self.figures.add("log_cost", session.name, cost / 1e6)
        with self.figures.noting(session.name, "log_latency"):
            assert isinstance(session.kernel, Kernel)
            found = latency.latencies(session.kernel, 2, self.plan.latency_s)
            for each in found:
                if not each:
                    raise RuntimeError("no picture came while the run went on")
                self.figures.add("log_latency", session.name, median(each))

    def at_size(self, name: str, num_ranks: int) -> None:
        session = self.started(name, num_ranks)
        if session is None:
            return
        row = f"cell_{num_ranks}"
        try:
            if session.keeps_state:
                self.trivial(session, row)
            else:  # it would take as long once more
                self.figures.say(row, name, "a start")
        finally:
            session.close()

    def on_gpus(self, num_gpus: int) -> None:
        """GPT-2 in a cell and as a script, in turns."""
        device = machine.printed(sys.executable, gpu.NAME)
        for number in range(self.plan.rounds):
            for kind in gpu.SESSIONS[:: 1 if number % 2 == 0 else -1]:
                session = kind(num_gpus)
                try:
                    with self.figures.noting(session.name, "gpt2_tokens"):
                        session.open()
                        session.start()
                        rate, by_median = gpu.tokens_per_s(session)
                        self.figures.add("gpt2_tokens", session.name, rate)
                        self.figures.add("gpt2_median", session.name, by_median)
                        share = gpu.utilization(rate, num_gpus, device)
                        if share is not None:
                            self.figures.add("gpt2_mfu", session.name, share)
                finally:
                    session.close()

    # ---- failures ----

    def failure(self, session: Session, kind: str) -> None:
        """A cell goes wrong: to the prompt, from there to a cell that works, and what
        is left."""
        name, figures = session.name, self.figures
        with figures.noting(name, f"{kind}_prompt"):
            try:
                failed_at, request = cause(session, kind)
            except TimeoutError:  # what the failure before has left does not work
                renew(session)
                failed_at, request = cause(session, kind)
            ended: Ended | None = None
            try:
                ended = session.end(request, FAILURE_LIMIT_S)
                figures.add(f"{kind}_prompt", name, ended.at - failed_at)
            except TimeoutError:
                figures.hangs(f"{kind}_prompt", name, FAILURE_LIMIT_S)
            began = ended.at if ended else time.time()
            with figures.noting(name, f"{kind}_next"):
                if not (ended and works_again(session, kind)):
                    began = time.time()  # a user would not have waited in vain
                    renew(session)
                    how = "lost, all ranks restarted"
                else:
                    how = what_is_kept(session, kind)
                figures.add(f"{kind}_next", name, time.time() - began)
                if ended and not ended.is_error:
                    how += "; the cell says ok"
                figures.say(f"{kind}_state", name, how)
                return
        # It came to grief in another way than was meant, or for good.
        with contextlib.suppress(RuntimeError, OSError, NotThereError, TimeoutError):
            renew(session)


def edit(session: Session, number: int) -> float:
    """Seconds from a training cell, with a word in it changed, to its first step."""
    session.forget()
    code = cells.training(session.folder, 128, 3, lr=0.01 + number / 1000)
    began = time.time()
    ended = session.run(code, CELL_LIMIT_S, strategy="")
    if ended.is_error:
        raise RuntimeError(ended.text)
    return max(session.noted("first-step", 1)) - began


def rates_of(session: Session, steps: dict[int, int], strategy: str) -> list[float]:
    """Steps per second of the slower rank, for each width of the layers."""
    session.forget()
    is_prepared = bool(strategy) and isinstance(session, Labkit)
    code = "".join(
        cells.training(
            session.folder, width, count, strategy=strategy, is_prepared=is_prepared
        )
        for width, count in steps.items()
    )
    ended = session.run(code, CELL_LIMIT_S, strategy=strategy)
    if ended.is_error:
        raise RuntimeError(ended.text)
    return [min(session.noted(f"rate-{width}", 1)) for width in steps]


def cause(session: Session, kind: str) -> tuple[float, Any]:
    """Make a cell go wrong: when it did so, and its request."""
    if session.keeps_state:  # a rank that was brought back has lost it
        session.run(cells.KEEP, CAUSE_LIMIT_S)
    session.forget()
    if kind != "interrupt":
        request = session.begin(cells.failure(session.folder, kind))
        return session.noted_by_one("cause", CAUSE_LIMIT_S), request
    request = session.begin(cells.stuck(session.folder))
    session.noted("inside", CAUSE_LIMIT_S)
    time.sleep(cells.SETTLE_S)
    failed_at = time.time()
    session.interrupt()
    return failed_at, request


def works_again(session: Session, kind: str) -> bool:
    """Whether a cell works, after what the peer has for a repair."""
    if kind == "kill":  # or else the first cell would only tell what is known
        with contextlib.suppress(TimeoutError):
            session.repair(NEXT_LIMIT_S)
    return session.works(NEXT_LIMIT_S)


def what_is_kept(session: Session, kind: str) -> str:
    """Of the variables, after a failure that the session has survived."""
    kept = session.noted("sum-is-right", 1)
    survivors = kept[:-1] if kind == "kill" else kept
    if all(survivors):
        return "kept" if all(kept) else "kept by the other ranks"
    return "lost"


def renew(session: Session) -> None:
    """New ranks, and a new kernel for them."""
    session.kill()
    session.open()
    session.start()
