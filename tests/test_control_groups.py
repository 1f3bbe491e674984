"""What a container lets ranks use: the limits of real control groups."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from labkit.control_groups import cpu_limit
from labkit.control_groups import memory_limit

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's"),
]

LIMIT_BYTES = 300 * 2**20
WITHIN = """
import json
from labkit.control_groups import cpu_limit, memory_limit
from labkit.control_groups import memory_available, memory_total
from labkit.host.devices import num_cores
before = memory_available()
used = bytearray(100 * 2**20)
print(json.dumps([cpu_limit(), num_cores(), memory_limit(), memory_total()]))
print(json.dumps([before, memory_available()]))
"""


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Control groups of 0.75 cores and of 300 MiB, or one of both."""
    told = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {names: path for _, names, path in (line.split(":", 2) for line in told)}
    root, name = Path("/sys/fs/cgroup"), f"labkit-test-{os.getpid()}"
    if "memory" in paths:
        of_cpu, of_memory = (
            root / each / paths[each].lstrip("/") / name for each in ("cpu", "memory")
        )
        limits = {
            of_cpu / "cpu.cfs_period_us": 100_000,
            of_cpu / "cpu.cfs_quota_us": 75_000,
            of_memory / "memory.limit_in_bytes": LIMIT_BYTES,
        }
    else:
        of_cpu = of_memory = root / paths.get("", "/").lstrip("/") / name
        limits = {
            of_cpu / "cpu.max": "75000 100000",
            of_cpu / "memory.max": LIMIT_BYTES,
        }
    with ExitStack() as made:
        try:
            for group in {of_cpu, of_memory}:
                group.mkdir()
                made.callback(group.rmdir)
            for file, limit in limits.items():
                file.write_text(f"{limit}")
        except (OSError, KeyError) as error:
            pytest.skip(f"no control group with a limit can be made here: {error}")
        yield [of_cpu, of_memory]


def run_in(groups: list[Path]) -> list[list[float]]:
    """What `WITHIN` finds in these groups."""
    enter = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
    done = subprocess.run(
        ["sh", "-c", f'{enter}exec "$0" -c "$1"', sys.executable, WITHIN],
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_containers_limits_are_what_ranks_have(groups: list[Path]) -> None:
    limits, (before, after) = run_in(groups)
    assert limits == [0.75, 1, LIMIT_BYTES, LIMIT_BYTES]
    assert 200 * 2**20 < before <= LIMIT_BYTES
    assert 90 * 2**20 < before - after < 110 * 2**20


def test_a_limit_of_the_group_around_counts(groups: list[Path]) -> None:
    inner = [group / "inner" for group in dict.fromkeys(groups)]
    for group in inner:
        group.mkdir()
    try:
        limits, _ = run_in(inner)
    finally:
        for group in inner:
            group.rmdir()
    assert limits == [0.75, 1, LIMIT_BYTES, LIMIT_BYTES]


def test_without_a_limit_it_is_the_machines() -> None:
    if memory_limit() or cpu_limit():
        pytest.skip("the tests themselves are in a group with a limit")
    limits, _ = run_in([])
    cores = len(os.sched_getaffinity(0))
    assert limits == [None, cores, None, psutil.virtual_memory().total]
