"""Scripts and libraries of others on a lab's ranks, against two processes of their own.

They are in an environment of their own: `make test-third-party`.
"""

import importlib.util
import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from labkit import Lab
from labkit import Run

SCRIPTS = Path(__file__).parent / "scripts"
LIBRARIES = ("accelerate", "lightning", "peft", "transformers")
MISSING = [each for each in LIBRARIES if importlib.util.find_spec(each) is None]

# Read when the libraries are imported; ranks inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        why = f"{', '.join(MISSING)} not installed: make test-third-party has its own"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=why))


WITHOUT_OPS = """
import deepspeed
from deepspeed.ops.op_builder.all_ops import ALL_OPS
deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
"""
"""DeepSpeed compiles one for inference otherwise, which takes a minute."""


@dataclass
class Outcome:
    """What a script has left in its output folder."""

    losses: list[list[float]]
    """By rank; of one rank where the script keeps no others."""
    weights: dict[str, torch.Tensor]

    @classmethod
    def read(cls, folder: Path) -> "Outcome":
        files = sorted(folder.glob("losses*.json"))
        return cls(
            [json.loads(each.read_text()) for each in files],
            torch.load(folder / "model.pt"),
        )

    def check(self, other: "Outcome") -> None:
        for ours, theirs in zip(self.losses, other.losses, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        torch.testing.assert_close(self.weights, other.weights, rtol=1e-4, atol=1e-6)


def run_as_rank(
    rank: int, port: int, is_done: Any, script: str, arguments: list[str]
) -> None:
    """Run a script in this process, in the environment that torchrun gives."""
    # Gloo's destructor can wait for ever, right after a group's last collective.
    dist.destroy_process_group = lambda *args: None
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    if "--deepspeed" in arguments:
        exec(WITHOUT_OPS)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    is_done.wait()
    os._exit(0)


@pytest.fixture(scope="session")
def processes() -> Any:
    """Starts processes that have the libraries imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning", "transformers", "accelerate"])
    return context


@pytest.fixture
def two_processes(processes: Any, tmp_path: Path) -> Callable[..., Outcome]:
    """Run a script in two processes without labkit: what it gives."""

    def run(script: str, *arguments: str) -> Outcome:
        folder = tmp_path / "two_processes"
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = [each.format(output=folder) for each in arguments]
        is_done = processes.Barrier(2)
        path = str(SCRIPTS / script)
        ranks = [
            processes.Process(
                target=run_as_rank, args=(rank, port, is_done, path, given)
            )
            for rank in range(2)
        ]
        try:
            for each in ranks:
                each.start()
            connection.wait([each.sentinel for each in ranks])
            for each in ranks:
                each.join(10)
        finally:
            for each in ranks:
                each.kill()
        assert [each.exitcode for each in ranks] == [0, 0]
        return Outcome.read(folder)

    return run


@pytest.fixture
def on_ranks(lab: Lab, tmp_path: Path) -> Callable[..., tuple[Run, Outcome]]:
    """Run a script on the ranks by `%run`: the run, and what the script gives."""

    def run(script: str, *arguments: str) -> tuple[Run, Outcome]:
        folder = tmp_path / "on_ranks"
        folder.mkdir()
        given = [each.format(output=folder) for each in arguments]
        line = " ".join(["%run", str(SCRIPTS / script), *given])
        if "--deepspeed" in arguments:
            lab.run(WITHOUT_OPS)
        run = lab.train("raw", line, live=False)
        return run, Outcome.read(folder)

    return run


CHECK = """
import os
total = torch.ones(1)
dist.all_reduce(total)
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
whole = [total.item(), [os.environ.get(name) for name in names]]
"""


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Any:
    """After each test group and environment are whole, and no process is left."""
    if "lab" not in request.fixturenames and "on_ranks" not in request.fixturenames:
        yield
        return
    lab: Lab = request.getfixturevalue("lab")
    before = set(processes_of(lab))
    yield
    lab.run(CHECK)
    for rank, whole in enumerate(lab.pull("whole", "all")):
        assert whole == [2.0, [str(rank), str(rank), "2", "2", "127.0.0.1"]]
    assert set(processes_of(lab)) <= before


def processes_of(lab: Lab) -> list[int]:
    """Of the ranks and what they started."""
    lab.run("import os\npid = os.getpid()")
    return [
        child.pid
        for pid in lab.pull("pid", "all")
        for child in psutil.Process(pid).children(recursive=True)
    ]
