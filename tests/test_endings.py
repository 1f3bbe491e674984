"""However a kernel or a script ends, nothing of its lab is left behind."""

import asyncio
import contextlib
import gc
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from isolation import own_environment
from isolation import processes_of
from kernels import Kernel
from kernels import running_kernel
from kernels import wait_until
from marks import long_but

from labkit import Lab
from labkit.compat.torch import keep_sockets_of_workers_in
from labkit.host import watchdog
from labkit.host.processes import Host
from labkit.notebook.cluster.engines import Cluster

pytestmark = [pytest.mark.timeout(120), pytest.mark.engine]

LIMIT_S = 30


def start_lab(kernel: Kernel) -> str:
    kernel.run("%load_ext labkit")
    kernel.run("%dist_start -n 2")
    [token] = kernel.lab_tokens()
    # The controller, the fork server and two ranks.
    assert len(watchdog.find_processes(token)) >= 4
    return token


@pytest.mark.parametrize(
    ("ending", "busy"),
    long_but(
        [
            ("kill", False),
            ("kill", True),
            ("shutdown", False),
            ("shutdown now", True),
            ("restart", True),
        ],
        ("kill", True),
    ),
)
def test_nothing_is_left_behind_and_another_lab_left_alone(
    ending: str,
    busy: bool,
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other is this process's own."""
    # A folder of its own: other labs may come and go at the same time.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running_kernel() as kernel:
        token = start_lab(kernel)
        assert [*tmp_path.glob("labkit-*")]
        children = kernel.process.children()
        assert [c for c in children if "render_process" in " ".join(c.cmdline())]
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
    lab.run("dist.barrier()\nfine = True")
    assert lab.pull("fine", "all") == [True, True]


@pytest.mark.parametrize("stage", long_but(["_start_watchdog", "listen"], "listen"))
@pytest.mark.long
def test_a_stop_ends_what_a_restart_in_another_thread_has_started(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, tokens = threading.Event(), set()
    owner = Cluster if hasattr(Cluster, stage) else Host
    method = getattr(owner, stage)

    def note(this: Any, *args: Any) -> Any:
        tokens.add((this.host if owner is Cluster else this).token)
        began.set()
        return method(this, *args)

    with Lab(num_ranks=2) as lab, ThreadPoolExecutor() as threads:
        monkeypatch.setattr(owner, stage, note)
        restart = threads.submit(lab.restart, everyone=True)
        assert began.wait(60)
        lab.stop()
        [token] = tokens
        assert not watchdog.find_processes(token)
        with pytest.raises(RuntimeError, match="was stopped while its ranks started"):
            restart.result(60)
        assert not watchdog.find_processes(token)


@pytest.mark.long
def test_a_stop_does_not_wait_for_what_the_notebook_has_forked() -> None:
    """As a DataLoader's worker, which has a copy of every pipe."""
    lab = Lab(num_ranks=1)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        lab.stop()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.release
def test_labs_that_come_and_go_leave_nothing_in_the_kernel() -> None:
    kernel = psutil.Process()

    def counts() -> tuple[int, int]:
        gc.collect()
        return kernel.num_fds(), kernel.num_threads()

    async def start_and_stop() -> None:
        with Lab(num_ranks=1):  # as in a notebook, where a loop is running
            pass

    asyncio.run(start_and_stop())
    fds, threads = counts()
    asyncio.run(start_and_stop())
    wait_until(
        lambda: counts()[0] <= fds and counts()[1] <= threads,
        LIMIT_S,
        f"there were {fds} descriptors and {threads} threads",
    )


# ---- scripts ----


OTHER_LAUNCHERS = {
    "LABKIT_LAB": "another lab's",
    "IPP_CONNECTION_INFO": "{}",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "another",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}
"""What a lab finds that is started in a rank of another, by torchrun, Slurm or MPI."""

SHARES_MEMORY = """
class Ones(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, index): return torch.ones(10000)
def share(worker=None): torch.multiprocessing.set_sharing_strategy("file_system")
if rank == 0: share()  # rank 1 has sockets in place of a manager
loader = torch.utils.data.DataLoader(
    Ones(), 8, num_workers=1, worker_init_fn=share if rank == 0 else None
)
kept = []
for number, batch in enumerate(loader):
    kept = [*kept[-3:], batch]
    if number == 9:
        # A manager whose worker is killed before it has heard of it leaves its folder.
        dist.barrier()
        print("shared", flush=True)
        if rank == 1: dist.barrier()  # its worker may be killed where it makes memory
"""

SCRIPTS = {
    "os._exit, tensors on their way from DataLoader workers": """
class Watch:
    def write(self, text):
        if "shared" in text: os._exit(5)
    def flush(self): pass
sys.stdout = Watch()
lab.run(shares_memory)
""",
    "stopped in another thread, then ended without a word": """
class Watch:
    def write(self, text):
        if "shared" in text: threading.Thread(target=lab.stop).start()
    def flush(self): pass
stdout, sys.stdout = sys.stdout, Watch()
try:
    lab.run(shares_memory)
except RuntimeError as error:
    assert str(error).startswith("the lab was stopped"), error
    sys.exit(5)
""",
}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose paths may have 108 bytes: `tmp_path` has too many."""
    made = tempfile.TemporaryDirectory(prefix="ends-", ignore_cleanup_errors=True)
    with made as name:
        yield Path(name)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
@pytest.mark.parametrize("name", long_but(SCRIPTS, next(iter(SCRIPTS))))
def test_a_script_leaves_nothing_behind(name: str, short_path: Path) -> None:
    environment = own_environment(short_path) | OTHER_LAUNCHERS
    environment["TMPDIR"] = str(short_path)
    del environment["HOME"]
    folder = short_path / "Zoë's folder"
    folder.mkdir()
    for name_of_library in ("torch", "random", "zmq"):  # which nothing may import
        (folder / f"{name_of_library}.py").write_text("raise ImportError")
    (folder / "own.py").write_text("")
    shared_before = set(Path("/dev/shm").glob("torch_*"))
    script = (
        "import os, sys, threading\nfrom labkit import Lab\n"
        f"shares_memory = {SHARES_MEMORY!r}\nlab = Lab(2)\n"
        "lab.run('import own\\nranks = torch.tensor([rank])\\n'\n"
        "    'dist.all_reduce(ranks)\\n'\n"
        "    'assert (ranks.item(), world_size) == (1, 2)')\n" + SCRIPTS[name]
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=3 * LIMIT_S,
    )
    assert done.returncode == 5, done.stderr
    wait_until(lambda: not processes_of(short_path), LIMIT_S, "processes are left")

    def left() -> list[Path]:
        names = ("labkit-*", "torch-shm-*", "pymp-*")
        return [path for name in names for path in short_path.glob(name)]

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left(), LIMIT_S, "a folder is left")
    assert left() == []
    shared = set(Path("/dev/shm").glob("torch_*")) - shared_before
    assert not [each for each in shared if is_orphan(each)]


def test_sockets_of_workers_are_where_their_paths_are_not_too_long() -> None:
    before = multiprocessing.util.get_temp_dir
    keep_sockets_of_workers_in("/" + 100 * "x")
    assert multiprocessing.util.get_temp_dir is before


def is_orphan(shared: Path) -> bool:
    """Whether the process that made this memory, torch_PID_..., is gone."""
    try:
        os.kill(int(shared.name.split("_")[1]), 0)
    except ProcessLookupError:
        return shared.exists()
    return False
