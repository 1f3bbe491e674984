"""How a process of a lab ended, and why, in words."""

import contextlib
import math
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

import psutil

from labkit import timeouts
from labkit.control_groups import count_oom_kills
from labkit.control_groups import memory_limit
from labkit.control_groups import read_oom_kills
from labkit.records import DUMP_SIGNAL
from labkit.records import SHORT
from labkit.records import format_bytes
from labkit.records import shorten
from labkit.unsent import unsent_output

_STOPPED = "received signal 15, stopping"
"""What ipyparallel's engine says of a SIGTERM."""

_LIKELY_CAUSES = {
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or /dev/shm is full",
    "SIGFPE": "a crash in native code",
    "SIGILL": "an instruction that this CPU does not have",
    "SIGABRT": "native code aborted",
    "SIGTERM": "terminated from outside",
    "SIGINT": "interrupted from outside",
    "SIGHUP": "its terminal or session was closed",
    "SIGXCPU": "its CPU time limit",
}
CRASHES = {"SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
NUM_LAST_LINES = 3
NUM_LOOKS = 4
"""Within the time of which a process has printed its last words, and then died."""
OTHER_COLLECTIVES = (
    "most likely ranks were in different collectives, for example because each runs "
    "other layers of a model for its own samples (a mixture of experts, an ODE solver "
    "that chooses its steps), which zero3, fsdp and hsdp cannot do: use ddp, zero1 or "
    "zero2"
)


@dataclass(frozen=True)
class Death:
    """What is known of a process that has ended."""

    pid: int
    cause: str
    """"killed by SIGSEGV (a crash in native code)"."""
    seen_at: float
    """When it was found out, in seconds since the epoch."""
    line: int | None
    """Of the cell, at which native code crashed."""
    remedy: str = "%dist_restart brings it back"
    """What to do about it."""
    unsent: dict[str, str] = field(default_factory=dict, hash=False)
    """What it had printed last, by stream, and nobody has got."""

    def __str__(self) -> str:
        return f"pid {self.pid}, {self.cause}"

    @property
    def clock(self) -> str:
        """The time of day."""
        return time.strftime("%H:%M:%S", time.localtime(self.seen_at))


class EngineProcess:
    """A process of a lab's on this host.

    `look` at it now and then: what it had last is part of why it died.
    """

    is_cut_off = False
    """What is sent to it arrives."""

    def __init__(
        self, process: psutil.Process, waiter: threading.Thread, log_file: str
    ) -> None:
        """`waiter` is the thread that waits for its end, and then has its exit code;
        what the process prints outside of cells is in `log_file`."""
        self.pid = process.pid
        self.key = "", self.pid
        """By which it is told from all others: none has the name of a host here."""
        self._process = process
        self._waiter = waiter
        self._log_file = Path(log_file)
        self.stack_file = str(self._log_file.with_suffix(".stack"))
        """Where it writes its Python stack when it is sent `DUMP_SIGNAL`."""
        self._native_file = self._log_file.with_suffix(".native")
        """What native code has printed in it, within cells as well."""
        self._unsent_file = self._log_file.with_suffix(".unsent")
        self.expected_cause = ""
        """Why it is about to end, where that is known beforehand."""
        self._memory_bytes = 0
        self._limit_bytes: int | None = None
        self._num_oom_kills: dict[str, int] = {}
        self._oom_kill_at = -math.inf
        self._look_at_group_at = -math.inf
        self._native_bytes: deque[int] = deque([0], maxlen=NUM_LOOKS)
        """How long that was, at the last looks."""
        self._death: Death | None = None
        self._lock = threading.Lock()
        self.look()

    @property
    def is_alive(self) -> bool:
        return self._death is None and self._waiter.is_alive()

    def send(self, signum: int) -> None:
        """Send it a signal, if it is there still: psutil compares creation times."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.send_signal(signum)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send(signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or this time is over."""
        self._waiter.join(timeout_s)

    def stall_reason(self) -> str:
        """Why it does not answer although it is there, in words."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_STOPPED:
                return (
                    f"its process {self.pid} is stopped, for example by SIGSTOP; kill "
                    f"-CONT {self.pid} continues it"
                )
            load = process.cpu_percent(0.05)
        except psutil.NoSuchProcess:
            return "its process has just ended"
        return f"native code holds the GIL; its process uses {load:.0f}% of a core"

    def ask_for_dump(self) -> None:
        """Have it write its stack; native code that holds the GIL or not."""
        Path(self.stack_file).write_text("")
        self.send(signal.Signals[DUMP_SIGNAL])

    def dumped_stack(self) -> str:
        """What it wrote then."""
        return Path(self.stack_file).read_text()

    def look(self) -> None:
        """Note how much memory it has, and whether it is alive."""
        if not self.is_alive:
            self.death()
            return
        with self._lock, contextlib.suppress(psutil.Error, OSError, ValueError):
            self._native_bytes.append(size_of(self._native_file))
            rss = self._process.memory_info().rss
            self._memory_bytes = rss or self._memory_bytes  # 0 as it is about to end
            # cgroup files are gone once the process is; read them while it lives.
            if (now := time.monotonic()) >= self._look_at_group_at:
                self._look_at_group_at = now + timeouts.LOOK_AGAIN_S
                self._look_at_group(is_ending=rss == 0)

    def _look_at_group(self, *, is_ending: bool) -> None:
        if not is_ending:
            self._limit_bytes = memory_limit(self.pid)
        self._count_oom_kills({**self._num_oom_kills, **count_oom_kills(self.pid)})

    def death(self) -> Death:
        """How it ended. Waits 2 s at most for the system to say so."""
        # The code is given once: that thread takes it, and keeps it there.
        self.wait(timeouts.REAP_S)
        if self.is_alive:
            return Death(
                self.pid, "no longer known to the controller", time.time(), None
            )
        with self._lock:
            if self._death is None:
                line = crash_line(self._printed())
                self._death = Death(
                    self.pid,
                    self._cause(),
                    time.time(),
                    line,
                    unsent=unsent_output(self._unsent_file),
                )
            return self._death

    def _cause(self) -> str:
        if self.expected_cause:
            return self.expected_cause
        code = self._process.wait(timeout=0)
        if code is None:  # somebody else took it
            return "ended"
        if code == 1 and _STOPPED in self.log():  # it was idle, and obeyed
            code = -signal.SIGTERM
        if code >= 0:
            return f"ended with exit code {code}{self._last_words()}"
        known = {each.value: each.name for each in signal.Signals}
        name = known.get(-code, f"signal {-code}")
        why = self._killer() if name == "SIGKILL" else _LIKELY_CAUSES.get(name)
        log = self._printed()
        if name == "SIGABRT" and (said := abort_text(log)):
            why = f"{why}: {said}"
        elif name in CRASHES:
            why = f"{why}{self._last_words()}"
        if call := crash_call(log):
            why = f"{why}, {call}" if why else call
        return f"killed by {name}" + (f" ({why})" if why else "")

    def _last_words(self) -> str:
        """What native code in it has printed in its last moments, in words; "" where
        that is nothing."""
        said = last_words(self._native())
        return f', after it printed "{said}"' if said else ""

    def _killer(self) -> str:
        """Who sends SIGKILL: the kernel counts what it kills when out of memory."""
        had = f"with {format_bytes(self._memory_bytes)} in use"
        if not self._num_oom_kills:
            return f"by hand, or by the system when out of memory, {had}"
        self._count_oom_kills(self._num_oom_kills)
        if time.monotonic() - self._oom_kill_at > timeouts.OOM_KILL_S:
            return f"by a program or by hand, not by the out-of-memory killer, {had}"
        if self._limit_bytes is not None:
            limit = format_bytes(self._limit_bytes)
            had += f", and its control group (its container) is limited to {limit}"
        return f"by the kernel, out of memory, {had}"

    def _count_oom_kills(self, paths: Iterable[str]) -> None:
        """Note when a count rose; a process may move from one group to another."""
        counts = read_oom_kills(paths)
        for path, count in counts.items():
            if count > self._num_oom_kills.get(path, count):
                self._oom_kill_at = time.monotonic()
        self._num_oom_kills = counts

    def log(self) -> str:
        """What it printed outside of cells; "" where that was nothing."""
        try:
            return self._log_file.read_text(errors="replace")
        except OSError:
            return ""

    def _printed(self) -> str:
        """All of that, where a stack may be: a cell's own `faulthandler.enable()` has
        it written to stderr, as other native output is."""
        return f"{self.log()}\n{self._native()}"

    def _native(self) -> str:
        """What native code has printed since the first of the last looks."""
        try:
            with self._native_file.open(errors="replace") as file:
                file.seek(self._native_bytes[0])
                return file.read()
        except OSError:
            return ""


def size_of(file: Path) -> int:
    """In bytes; 0 where there is no such file."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def crash_line(log: str) -> int | None:
    """The innermost line of the cell at which the main thread was as native code
    crashed, as Python's faulthandler wrote it; None where it did not, or not all."""
    _, crash, threads = log.rpartition("Fatal Python error: ")
    main = re.split(r"hread 0x\w+", threads)[-1]  # the last, its innermost call first
    found = re.findall(r'File "(.*ipykernel_\d+/\d+\.py)", line (\d+)', main)
    if not (crash and found) or re.search(r"^\s*\.\.\.$", main, re.MULTILINE):
        return None
    cell, _ = found[-1]  # others have defined functions that it calls
    return next(int(line) for file, line in found if file == cell)


def crash_call(log: str) -> str:
    """The call of Python's in which native code crashed, in words, where that is not a
    line of the cell itself."""
    _, _, threads = log.rpartition("Fatal Python error: ")
    _, _, own = threads.partition("Current thread ")
    found = re.search(r'File "(.*)", line (\d+) in (\S+)', own)
    if found is None or re.search(r"ipykernel_\d+/\d+\.py$", found[1]):
        return ""
    path = re.split(r"(?:site|dist)-packages/", found[1])[-1]
    return f"in {found[3]} at {path}:{found[2]}"


def last_words(printed: str) -> str:
    """The last lines of what was printed, in one; not Python's stack, if that is the
    very last."""
    before, crash, _ = printed.rpartition("Fatal Python error: ")
    printed = before if crash else printed
    own = [line.strip() for line in printed.splitlines() if line.strip()]
    return shorten("; ".join(own[-NUM_LAST_LINES:]), SHORT)


def abort_text(log: str) -> str:
    """What C++ wrote as it ended the process for an exception that nobody caught, as in
    a thread of gloo's, and why that is; "" where that was not written, or was lost
    with the process."""
    found = re.findall(r"terminate called [^\n]*(?:\n  what\(\):[^\n]*)?", log)
    # Before it a process that the rank had started may have ended like that.
    said = " ".join(found[-1].split()) if found else ""
    # Two threads of gloo's that fail at once cut off what each of them writes.
    is_cut = said.endswith((" recursively", "Fatal Python error: Aborted"))
    said = "terminate called" if is_cut else said
    is_known = is_cut or "gloo::EnforceNotMet" in said
    return f"{said}; {OTHER_COLLECTIVES}" if is_known else said
