"""However a kernel ends, nothing of its lab is left behind."""

import signal
from pathlib import Path

import pytest
from kernels import Kernel
from kernels import running_kernel
from kernels import wait_until

from labkit.notebook import watchdog

pytestmark = pytest.mark.timeout(120)

LIMIT_S = 10


def start_lab(kernel: Kernel) -> str:
    kernel.run("%load_ext labkit")
    kernel.run("%dist_start -n 2")
    [token] = kernel.lab_tokens()
    assert len(watchdog.find_processes(token)) >= 5
    return token


@pytest.mark.parametrize("ending", ["kill", "shutdown", "shutdown now", "restart"])
@pytest.mark.parametrize("busy", [False, True])
def test_nothing_is_left_behind(
    ending: str, busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder of its own: other labs may come and go at the same time.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running_kernel() as kernel:
        token = start_lab(kernel)
        assert [*tmp_path.glob("labkit-*")]
        children = kernel.process.children()
        assert [c for c in children if "painter" in " ".join(c.cmdline())]
        if busy:
            # Ranks in a collective that cannot complete, the kernel waiting for them.
            code = "if rank == 0: dist.barrier()\nelse:\n    while True: pass"
            kernel.client.execute(f"%%dist\n{code}")
        if ending == "kill":
            kernel.process.send_signal(signal.SIGKILL)
        elif ending == "restart":
            kernel.manager.restart_kernel(now=True)
        else:
            kernel.manager.shutdown_kernel(now=ending == "shutdown now")
        wait_until(
            lambda: not watchdog.find_processes(token), LIMIT_S, "processes are left"
        )
        wait_until(
            lambda: not [*tmp_path.glob("labkit-*")], LIMIT_S, "a folder is left"
        )
        wait_until(
            lambda: not any(child.is_running() for child in children),
            LIMIT_S,
            "a child is left",
        )


def test_one_labs_end_leaves_another_alone() -> None:
    with running_kernel() as one, running_kernel() as other:
        token = start_lab(one)
        start_lab(other)
        one.process.send_signal(signal.SIGKILL)
        wait_until(
            lambda: not watchdog.find_processes(token), LIMIT_S, "processes are left"
        )
        reply = other.run("%%dist\ndist.barrier()\nprint('fine')")
        assert reply.stdout == "[ranks 0-1] fine\n"
