"""Engines are forks of one process that has torch imported."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from labkit import Lab
from labkit import RankError
from labkit import timeouts
from labkit.checks import UserError
from labkit.host.forked_engines import ForkServer

pytestmark = pytest.mark.engine

FACTS = """
import json, os, random, signal, sys, threading
import numpy as np
facts = dict(
    parent=os.getppid(),
    session=os.getsid(0),
    pid=os.getpid(),
    drawn=[random.random(), float(np.random.rand())],
    folder=os.getcwd(),
    variable=os.environ.get("LABKIT_TESTED"),
    term=signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    pipes=sum("pipe:" in os.readlink(f"/proc/self/fd/{fd}")
              for fd in os.listdir("/proc/self/fd")
              if os.path.exists(f"/proc/self/fd/{fd}")),
    product=float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()),
    is_main=vars(sys.modules["__main__"]) is globals(),
    gc=__import__("gc").isenabled(),
)
"""


@pytest.fixture(scope="module")
def own_lab() -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_TESTED", "yes")
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        with Lab(num_ranks=2) as lab:
            yield lab


@pytest.fixture
def lab(own_lab: Lab) -> Lab:
    """A lab whose server's life is these tests' own."""
    own_lab.restart()
    return own_lab


@pytest.mark.long
def test_a_debug_level_with_which_torch_crashes_is_lowered(own_lab: Lab) -> None:
    own_lab.run("torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    own_lab.run("level = dist.get_debug_level().name")
    assert own_lab.pull("level", "all") == ["INFO", "INFO"]


def test_engines_share_an_import_and_nothing_else(lab: Lab) -> None:
    lab.run(FACTS)
    found = lab.pull("facts", "all")
    [server] = {each["parent"] for each in found}
    assert server != os.getpid()
    assert psutil.Process(server).ppid() == os.getpid()
    for name in ("session", "pid"):
        assert found[0][name] != found[1][name]
    for each in found:
        assert each["session"] == each["pid"]
        assert each["folder"] == str(Path.cwd())
        assert each["variable"] == "yes"
        assert each["product"] == 300.0**3
        assert each["is_main"]
        assert each["gc"]
    drawn = [number for each in found for number in each["drawn"]]
    assert len(set(drawn)) == 4
    # What is new is as the others are: the server imported torch before them.
    with pytest.raises(RankError, match="killed by SIGKILL"):
        lab.run("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert lab.restart() == [1]
    lab.run(FACTS)
    again = lab.pull("facts", "all")
    assert again[1]["parent"] == server
    assert again[1]["folder"] == str(Path.cwd())
    assert {*again[1]["drawn"]}.isdisjoint(drawn)


def test_a_rank_is_one_process_and_copies_nothing_that_was_imported(
    own_lab: Lab,
) -> None:
    # A collection that looks at what was imported writes to each of its pages.
    own_lab.run(
        "import gc; frozen, later = gc.get_freeze_count(), len(gc.get_objects())"
    )
    for frozen, later in zip(
        own_lab.pull("frozen", "all"), own_lab.pull("later", "all"), strict=True
    ):
        assert frozen > 100_000 > later
    for pid in own_lab.status()["pid"]:
        assert psutil.Process(int(pid)).children() == []


@pytest.mark.long
def test_ranks_outlive_the_server_and_another_takes_its_place(lab: Lab) -> None:
    lab.run("import os; kept, server = 'kept', os.getppid()")
    server = lab.pull("server", 1)  # rank 0 may be another's orphan
    os.kill(server, signal.SIGKILL)
    lab.run("dist.barrier()")
    assert lab.pull("kept", "all") == ["kept"] * 2
    # How it ended is known, unless the system's first process was quicker.
    with pytest.raises(RankError, match=r"died: pid \d+, ended( with .* 3)?;"):
        lab.run("if rank == 1: os._exit(3)")
    assert lab.restart() == [1]
    lab.run("import os; server = os.getppid()", ranks=1)
    assert lab.pull("server", 1) != server
    with pytest.raises(RankError, match="ended with exit code 3"):
        lab.run("if rank == 1: os._exit(3)")
    assert not psutil.pid_exists(server)


@pytest.mark.release
def test_a_server_that_is_stopped_hides_no_death_and_hangs_no_restart(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.run("import os; server = os.getppid()")
    server = lab.pull("server", 1)  # rank 0 may be another's orphan
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(RankError, match="ended with exit code 3"):
        lab.run("if rank == 1: os._exit(3)")
    # It is given up after a while, and another takes its place.
    monkeypatch.setattr(timeouts, "FORK_S", 1)
    with pytest.raises(UserError, match="has not answered for 1 s"):
        lab.restart()
    assert lab.restart() == [1]
    lab.run("dist.barrier()")
    lab.run("import os, signal")
    with pytest.raises(RankError, match="killed by SIGKILL"):
        lab.run("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.long
def test_what_keeps_the_server_from_importing_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcudart is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UserError, match=r"has ended; it printed:\n(.*\n)*.*libcudart"):
        Lab(num_ranks=2)


@pytest.mark.release
def test_a_server_that_dies_with_a_request_unread_is_an_error(tmp_path: Path) -> None:
    server, pid = started(tmp_path)
    os.kill(pid, signal.SIGSTOP)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(UserError, match="no engine was started: the process"):
        server.fork([], {}, str(tmp_path / "out"), check=kill)
    server.join()
    assert not psutil.pid_exists(pid)


@pytest.mark.release
def test_an_interrupt_ends_the_wait_for_a_server(tmp_path: Path) -> None:
    server, pid = started(tmp_path)
    os.kill(pid, signal.SIGSTOP)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.fork([], {}, str(tmp_path / "out"), check=interrupt)
    server.join()


@pytest.mark.release
def test_a_lab_starts_beside_many_open_files_and_without_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096), limits[1]))
    try:
        with contextlib.ExitStack() as files:
            for _ in range(1100):
                files.enter_context(Path(os.devnull).open())
            with Lab(num_ranks=2) as lab:
                monkeypatch.chdir(tmp_path)
                folder.rmdir()
                with pytest.raises(RankError, match="ended with exit code 3"):
                    lab.run("import os\nif rank == 1: os._exit(3)")
                assert lab.restart() == [1]
                lab.run("dist.barrier()")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.release
def test_a_stop_leaves_no_zombie_of_a_rank_that_has_to_be_killed() -> None:
    with Lab(num_ranks=2) as lab:
        pids = list(lab.status()["pid"])
        lab.run("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert not any(psutil.pid_exists(pid) for pid in pids)


def started(folder: Path) -> tuple[ForkServer, int]:
    """A server that is ready, and its process id."""
    before = psutil.Process().children()
    server = ForkServer({}, folder / "log")
    server.wait_until_ready(lambda: None)
    [process] = set(psutil.Process().children()) - set(before)
    return server, process.pid


@pytest.mark.long
def test_a_server_that_has_ended_forks_no_engine(tmp_path: Path) -> None:
    server, pid = started(tmp_path)
    os.kill(pid, signal.SIGTERM)
    server.join()
    assert not server.is_alive
    with pytest.raises(UserError, match="no engine was started"):
        server.fork([], {}, str(tmp_path / "out"))


@pytest.mark.release
def test_an_engine_whose_server_has_used_cuda_imports_torch_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a CUDA build of torch answers in a fork of a process that has called CUDA.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'labkit.rank.engine.fork_server' in sys.orig_argv:\n"
        "    import torch\n"
        "    torch.cuda._is_in_bad_fork = lambda: True\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Lab(num_ranks=2) as lab:
        lab.run("import os, sys; started_as = sys.orig_argv[1:4]; dist.barrier()")
        command = ["-P", "-m", "ipyparallel.engine"]
        assert lab.pull("started_as", "all") == [command] * 2
        with pytest.raises(RankError, match="ended with exit code 3"):
            lab.run("if rank == 1: os._exit(3)")
