"""A peer's ranks and what drives them: the verbs that every peer has.

Whatever is awaited has a limit, and whatever was started carries a token in its
environment, by which it is found and ended: a peer that hangs holds up nothing.
"""

import os
import shutil
import sys
import tempfile
import time
import uuid
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import ClassVar

import psutil
from _kernel import Kernel

from peers import cells

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 120.0
TOKEN = "LABKIT_BENCH_TOKEN"
SURROUNDINGS = {
    # One thread a rank and gloo on the loopback device, for everybody.
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}


class NotThereError(Exception):
    """Why a peer has no figure."""


@dataclass(frozen=True)
class Ended:
    """How a cell, or a script, has ended."""

    is_error: bool
    at: float
    """When, by `time.time`."""
    text: str


class Session(ABC):
    """Ranks of one peer. A subclass says how it starts, runs code and ends.

    Parameters
    ----------
    num_ranks : int
        How many.
    """

    name: ClassVar[str]
    """Of its environment in .venv-peers, and in the figures."""
    package: ClassVar[str]
    """Whose version is named."""
    keeps_state: ClassVar[bool] = True
    has_strategies: ClassVar[bool] = False
    """Whether it takes part in the rows that have one."""
    no_transfer: ClassVar[str] = ""
    """Why there is no push and no pull, where that is so."""
    no_pull: ClassVar[str] = ""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.token = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))

    # ---- what a peer has ----

    @abstractmethod
    def open(self) -> None:
        """What comes before the start, and is not timed."""

    @abstractmethod
    def start(self) -> float:
        """Have ranks that all-reduce; the seconds that it took."""

    @abstractmethod
    def begin(self, code: str, *, strategy: str | None = None) -> Any:
        """Send code to every rank, to train where there is a strategy ("" is one by
        hand); what `end` takes."""

    @abstractmethod
    def end(self, request: Any, limit_s: float) -> Ended:
        """Wait for the end of a cell; TimeoutError where it does not come."""

    @abstractmethod
    def interrupt(self) -> None:
        """As the stop button, or Ctrl-C."""

    @abstractmethod
    def push(self, megabytes: int, limit_s: float) -> float:
        """Seconds to bring an array to every rank."""

    @abstractmethod
    def pull(self, megabytes: int, limit_s: float) -> float:
        """Seconds to bring it back from rank 0."""

    @property
    def driver_pid(self) -> int | None:
        """The kernel's process."""
        return None

    def repair(self, limit_s: float) -> bool:
        """Whether it has a way to bring a dead rank back, which was gone."""
        return False

    # ---- what all have ----

    @classmethod
    def python(cls) -> str:
        """The Python of the peer's own environment; NotThereError without one."""
        folder = ROOT / ".venv-peers" / cls.name
        if not (folder / "installed").exists():
            reason = folder / "failed"
            why = reason.read_text().strip() if reason.exists() else "make bench does"
            raise NotThereError(f"not installed: {why}")
        return str(folder / "bin" / "python")

    def environment(self) -> Mapping[str, str]:
        """The variables of whatever is started: an activated environment, and where
        to leave files."""
        path = os.pathsep.join([str(Path(self.python()).parent), os.environ["PATH"]])
        places = ("TMPDIR", "IPYTHONDIR", "LABKIT_RUNS", "JUPYTER_RUNTIME_DIR")
        return {
            **SURROUNDINGS,
            **dict.fromkeys(places, str(self.folder)),
            TOKEN: self.token,
            "PATH": path,
        }

    def run(self, code: str, limit_s: float, *, strategy: str | None = None) -> Ended:
        return self.end(self.begin(code, strategy=strategy), limit_s)

    def noted(self, name: str, limit_s: float) -> list[Any]:
        """What every rank has noted under `name`; TimeoutError if one has not."""
        paths = [self.folder / f"{name}-{rank}" for rank in range(self.num_ranks)]
        wait_until(lambda: all(path.exists() for path in paths), limit_s, name)
        return [cells.read_note(path) for path in paths]

    def noted_by_one(self, name: str, limit_s: float) -> Any:
        """What the first rank to do so has noted."""
        pattern = f"{name}-*[0-9]"  # one that is still written ends in .part
        wait_until(lambda: any(self.folder.glob(pattern)), limit_s, name)
        return cells.read_note(next(self.folder.glob(pattern)))

    def forget(self) -> None:
        """Forget what was noted."""
        for path in self.folder.glob("*-[0-9]*"):
            if path.is_file():
                path.unlink()

    def works(self, limit_s: float) -> bool:
        """Whether a cell runs on every rank and an all-reduce is right."""
        self.forget()
        try:
            self.run(cells.check(self.folder), limit_s)
            self.noted("sum-is-right", 0.1)
        except (TimeoutError, OSError, RuntimeError):
            return False
        return True

    def processes(self) -> list[psutil.Process]:
        """Whatever was started, and what that has started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(TOKEN) == self.token:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        """End all of it, and remove its files."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """End all of it."""
        until = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < until:
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(left, timeout=1)


class Notebook(Session):
    """A peer in a Jupyter kernel of its own environment: what its cells say."""

    command: ClassVar[tuple[str, ...]] = ("-m", "ipykernel_launcher")
    interrupt_mode: ClassVar[str] = "signal"
    pushing: ClassVar[str] = ""
    """The cell that brings `data` to every rank."""
    pulling: ClassVar[str] = ""
    repairing: ClassVar[str] = ""
    closing: ClassVar[str] = ""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.kernel: Kernel | None = None

    @abstractmethod
    def opening(self) -> list[str]:
        """The cells that start the ranks and form their group."""

    @abstractmethod
    def cell(self, code: str) -> str:
        """A cell in which every rank runs the code."""

    def training_cell(self, code: str, strategy: str) -> str:
        return self.cell(code)

    def open(self) -> None:
        self.kernel = Kernel(
            (self.python(), *self.command), self.interrupt_mode, self.environment()
        )

    def start(self) -> float:
        began = time.time()
        for opening in self.opening():
            self.succeed(opening, START_LIMIT_S)
        self.first_cells()
        return time.time() - began

    def first_cells(self) -> None:
        """See that a cell works, and set what failures may cost."""
        if not self.works(START_LIMIT_S):
            raise RuntimeError("the first all-reduce failed")
        if self.keeps_state:
            self.run(cells.KEEP, START_LIMIT_S)

    def begin(self, code: str, *, strategy: str | None = None) -> str:
        if strategy is None:
            return self._begin(self.cell(code))
        return self._begin(self.training_cell(code, strategy))

    def end(self, request: str, limit_s: float) -> Ended:
        assert self.kernel is not None
        reply = self.kernel.end(request, limit_s)
        return Ended(reply.status != "ok", reply.came_at, reply.text + reply.error)

    def interrupt(self) -> None:
        assert self.kernel is not None
        self.kernel.manager.interrupt_kernel()

    def push(self, megabytes: int, limit_s: float) -> float:
        if self.no_transfer:
            raise NotThereError(self.no_transfer)
        self.succeed(cells.data(megabytes), limit_s)
        return self.succeed(self.pushing, limit_s)

    def pull(self, megabytes: int, limit_s: float) -> float:
        if self.no_transfer or self.no_pull:
            raise NotThereError(self.no_transfer or self.no_pull)
        self.run(cells.data(megabytes), limit_s)
        seconds = self.succeed(self.pulling, limit_s)
        self.succeed(f"assert data.nbytes == {megabytes * 10**6}", limit_s)
        return seconds

    def repair(self, limit_s: float) -> bool:
        if not self.repairing:
            return False
        return not self._run_cell(self.repairing, limit_s).is_error

    @property
    def driver_pid(self) -> int | None:
        return self.kernel.pid if self.kernel else None

    def close(self) -> None:
        if self.closing and self.kernel is not None:
            try:
                self._run_cell(self.closing, 10)
            except TimeoutError:
                print(f"{self.name} did not stop by itself", file=sys.stderr)
        super().close()

    def kill(self) -> None:
        if self.kernel is not None:
            kernel, self.kernel = self.kernel, None
            kernel.close()
        super().kill()

    def _begin(self, cell: str) -> str:
        if self.kernel is None:
            raise RuntimeError("no kernel")
        return self.kernel.begin(cell)

    def _run_cell(self, cell: str, limit_s: float) -> Ended:
        return self.end(self._begin(cell), limit_s)

    def succeed(self, cell: str, limit_s: float) -> float:
        """Seconds for a cell that is to succeed."""
        began = time.time()
        ended = self._run_cell(cell, limit_s)
        if ended.is_error:
            raise RuntimeError(ended.text)
        return ended.at - began


def wait_until(holds: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for what files say; TimeoutError where it does not come."""
    until = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"no {what} after {limit_s:.0f} s")
        time.sleep(0.002)
