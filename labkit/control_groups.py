"""What control groups let a process use, such as those of containers (Linux).

Source: the kernel's documentation, `admin-guide/cgroup-v2.rst` and `cgroup-v1/`.
"""

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60
"""Groups without a limit report a number near 2**63, or "max"."""


def cpu_limit() -> float | None:
    """How many cores' time this process may use; None without a limit."""
    found = []
    for folder, is_unified in _folders("self", "cpu"):
        with contextlib.suppress(OSError, ValueError):
            if is_unified:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(pid: int | str = "self") -> int | None:
    """The bytes that a process and the others of its group may have; None without a
    limit."""
    limits = [limit for _, _, limit in _memory_limits(pid)]
    return min(limits, default=None)


def memory_total() -> int:
    """The bytes that this process may use: of the machine's, as its groups let it."""
    total: int = psutil.virtual_memory().total
    return min(total, memory_limit() or total)


def memory_available() -> int:
    """The bytes that this process can still have without swapping, or being killed."""
    found = [psutil.virtual_memory().available]
    for folder, is_unified, limit in _memory_limits("self"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            name = "memory.current" if is_unified else "memory.usage_in_bytes"
            used = int((folder / name).read_text())
            # Of it, what of files the kernel drops first.
            lines = (folder / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            name = "inactive_file" if is_unified else "total_inactive_file"
            found.append(max(limit - used + int(stat[name]), 0))
    return min(found)


def count_oom_kills(pid: int) -> dict[str, int]:
    """Kills by the kernel's out-of-memory killer so far: file -> its count.

    Of the process's control group, else of the whole host; {} where neither has one.
    """
    for folder, is_unified in _folders(pid, "memory"):
        name = "memory.events" if is_unified else "memory.oom_control"
        if counts := read_oom_kills([str(folder / name)]):
            return counts
    return read_oom_kills(["/proc/vmstat"])


def read_oom_kills(paths: Iterable[str]) -> dict[str, int]:
    """The counts that these files hold now; without those that cannot be read."""
    counts = {}
    for path in paths:
        with contextlib.suppress(OSError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    counts[path] = int(line.split()[1])
    return counts


def _memory_limits(pid: int | str) -> Iterator[tuple[Path, bool, int]]:
    for folder, is_unified in _folders(pid, "memory"):
        name = "memory.max" if is_unified else "memory.limit_in_bytes"
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / name).read_text())
            if limit < _NO_LIMIT:
                yield folder, is_unified, limit


def _folders(pid: int | str, controller: str) -> Iterator[tuple[Path, bool]]:
    """Of the groups that a process is in, from its own outwards; and whether each is of
    the unified hierarchy, cgroup v2.

    In a container the group's own folder may be mounted in place of the root.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = _ROOT / controller if controllers else _ROOT
            own = top / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(top):
                    yield folder, not controllers
