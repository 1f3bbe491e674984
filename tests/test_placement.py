import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from labkit import Lab
from labkit.host import devices as host_devices
from labkit.host.devices import count_gpus
from labkit.host.devices import has_driver
from labkit.notebook.cluster import placement
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.cluster.placement import place_ranks
from labkit.notebook.hosts.hosts import parse_hosts
from labkit.notebook.hosts.slurm import Job
from labkit.notebook.hosts.slurm import job_around
from labkit.notebook.hosts.slurm import tasks_of
from labkit.notebook.hosts.ssh import Ssh
from labkit.records import Placement


@pytest.fixture(autouse=True)
def no_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def place(
    num_ranks: Any = None, *, num_gpus: int | None = None, **options: Any
) -> list[Placement]:
    return place_ranks(StartOptions(num_ranks, **options), num_gpus=num_gpus)


def devices(placements: list[Placement]) -> list[str]:
    return [placement.device for placement in placements]


def test_two_cpu_ranks_with_gloo_is_the_default_without_a_gpu() -> None:
    first = Placement(
        rank=0,
        local_rank=0,
        world_size=2,
        device="cpu",
        backend="gloo",
        num_threads=1,
        group_timeout_s=1800.0,
    )
    second = replace(first, rank=1, local_rank=1)
    assert place(num_gpus=0) == [first, second]


def test_one_rank_per_gpu_with_nccl_is_the_default_with_gpus() -> None:
    placements = place(num_gpus=4)
    assert devices(placements) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert {placement.backend for placement in placements} == {"nccl"}


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_ranks_are_numbered_in_order(num_ranks: int) -> None:
    placements = place(num_ranks, num_gpus=0)
    assert [placement.rank for placement in placements] == list(range(num_ranks))
    assert [placement.local_rank for placement in placements] == list(range(num_ranks))
    assert {placement.world_size for placement in placements} == {num_ranks}


def test_fewer_ranks_than_gpus_take_the_first_ones() -> None:
    assert devices(place(2, num_gpus=4)) == ["cuda:0", "cuda:1"]


def test_ranks_share_a_gpu_with_gloo() -> None:
    placements = place(5, backend="gloo", num_gpus=2)
    assert devices(placements) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert {placement.backend for placement in placements} == {"gloo"}


def test_the_cpu_can_be_chosen_although_there_are_gpus() -> None:
    placements = place(device="cpu", num_gpus=4)
    assert devices(placements) == ["cpu", "cpu"]
    assert {placement.backend for placement in placements} == {"gloo"}


def test_the_timeout_of_the_group_reaches_every_rank() -> None:
    placements = place(3, group_timeout_s=7.5, num_gpus=0)
    assert [placement.group_timeout_s for placement in placements] == [7.5] * 3


# ---- threads ----


def test_omp_num_threads_is_the_users_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert {each.num_threads for each in place(num_gpus=0)} == {3}


def test_threads_come_before_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert {each.num_threads for each in place(threads=2, num_gpus=0)} == {2}


# OpenMP allows one number for each level of nesting; shells may export nothing.
@pytest.mark.parametrize(("value", "threads"), [("4,2", 4), ("", 1)])
def test_every_lawful_omp_num_threads_is_read(
    value: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert {each.num_threads for each in place(num_gpus=0)} == {threads}


@pytest.mark.parametrize(("num_gpus", "threads"), [(1, 16), (3, 5), (32, 1)])
def test_ranks_on_gpus_share_the_cores(
    num_gpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "num_cores", lambda: 16)
    assert {each.num_threads for each in place(num_gpus=num_gpus)} == {threads}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert {each.num_threads for each in place(num_gpus=num_gpus)} == {2}


# ---- what cannot be ----


@pytest.mark.parametrize("num_ranks", [0, -1, True, 2.0, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(num_ranks: Any) -> None:
    with pytest.raises(ValueError, match=f"{num_ranks!r} ranks; choose 1 or more"):
        place(num_ranks, num_gpus=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "mpi"}, "unknown backend 'mpi'; choose one of: auto, nccl, gloo"),
        ({"device": "tpu"}, "unknown device 'tpu'; choose one of: auto, cuda, cpu"),
        ({"threads": 0}, "threads is 0; it must be a whole number, 1 or more"),
        (
            {"group_timeout_s": 0},
            "group_timeout_s is 0; it must be a positive number of seconds",
        ),
        ({"device": "cuda"}, "--device cuda: no GPU is visible here"),
        ({"backend": "nccl"}, "--backend nccl needs a GPU .* --backend gloo"),
        ({"backend": "nccl", "device": "cpu"}, "--backend nccl needs a GPU"),
    ],
)
def test_what_cannot_be_placed_without_a_gpu_is_explained(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        place(num_gpus=0, **options)


@pytest.mark.parametrize(("num_gpus", "found"), [(1, "1 GPU is"), (2, "2 GPUs are")])
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_more_ranks_than_gpus_names_every_way_out(
    num_gpus: int, found: str, backend: str
) -> None:
    with pytest.raises(ValueError, match=f"4 ranks, but {found} visible") as error:
        place(4, backend=backend, num_gpus=num_gpus)
    for way_out in (f"-n {num_gpus}", "--backend gloo", "--device cpu"):
        assert way_out in str(error.value)


def test_every_way_out_of_too_few_gpus_leads_somewhere() -> None:
    assert len(place(1, num_gpus=1)) == 1
    assert len(place(4, backend="gloo", num_gpus=1)) == 4
    assert len(place(4, backend="gloo", device="cpu", num_gpus=1)) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"num_ranks": 0},
        {"backend": "mpi"},
        {"device": "tpu"},
        {"backend": "nccl", "device": "cpu"},
        {"threads": -1},
    ],
)
def test_bad_input_starts_and_changes_nothing(options: dict[str, Any]) -> None:
    environment = dict(os.environ)
    children = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError, match=r"choose|gloo|threads is -1"):
        Lab(**options)
    assert dict(os.environ) == environment
    assert psutil.Process().children(recursive=True) == children


def test_gpus_are_counted_without_a_cuda_context() -> None:
    import torch

    assert "torch" in sys.modules
    assert count_gpus() == torch.cuda.device_count()
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("version", "drivers", "count", "is_asked"),
    [
        ("cuda = hip = None", True, 0, False),
        ("cuda, hip = '13.0', None", True, 3, True),
        ("cuda, hip = '13.0', None", False, 0, False),
        ("cuda, hip = None, '7.1'", True, 3, True),  # an AMD machine
        ("cuda, hip = None, '7.1'", False, 0, False),
    ],
)
def test_a_process_asks_where_there_may_be_a_gpu(
    version: str,
    drivers: bool,
    count: int,
    is_asked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(command: list[str], **settings: Any) -> Any:
        asked.append(command[-1])
        return subprocess.CompletedProcess(command, 0, stdout="3\n")

    def load(name: str) -> None:
        assert name == "libcuda.so.1"
        if not drivers:
            raise OSError

    asked: list[str] = []
    file = tmp_path / "version.py"
    file.write_text(version)
    build = SimpleNamespace(locate_file=lambda path: file)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(host_devices.metadata, "distribution", lambda name: build)
    monkeypatch.setattr(host_devices.ctypes, "CDLL", load)
    monkeypatch.setattr(Path, "exists", lambda self: drivers)
    monkeypatch.setattr(host_devices.subprocess, "run", ask)
    assert count_gpus() == count
    ask = host_devices.ASK_DRIVER if "13.0" in version else host_devices.ASK_TORCH
    assert asked == [ask] * is_asked


def test_the_build_of_torch_is_known_without_its_import() -> None:
    import torch

    assert host_devices.torch_build() == (torch.version.cuda, torch.version.hip)
    assert not has_driver(None, None)


# ---- hosts ----


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1:2,node2:3", [("node1", 2), ("node2", 3)]),
        ("me@node1.cluster", [("me@node1.cluster", None)]),
        (" 10.0.0.1:8 , node-2", [("10.0.0.1", 8), ("node-2", None)]),
    ],
)
def test_hosts_are_read(text: str, found: list[tuple[str, int | None]]) -> None:
    assert [(each.name, each.num_ranks) for each in parse_hosts(text)] == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": "node1:0"}, "'0' ranks on node1; choose 1 or more"),
        ({"hosts": "node1:x"}, "'x' ranks on node1; choose 1 or more"),
        ({"hosts": "node1:-1"}, "'-1' ranks on node1; choose 1 or more"),
        ({"hosts": ""}, "'' is not a host; write HOST:N,HOST:N"),
        ({"hosts": "node1,,node2"}, "'' is not a host"),
        ({"hosts": "-oProxyCommand=x:1"}, "'-oProxyCommand=x:1' is not a host"),
        ({"hosts": "node1;reboot:1"}, "'node1;reboot:1' is not a host"),
        ({"hosts": "node1:2,node1:2"}, "names node1 twice"),
        ({"hosts": 3}, "hosts is 3; it names hosts"),
        ({}, "--launcher ssh needs --hosts"),
        ({"hosts": "node1:2", "num_ranks": 2}, "-n 2: --hosts says how many"),
        ({"hosts": "node1:2", "interface": "no0"}, "no network interface 'no0'"),
        ({"hosts": "node1:2", "launcher": "local"}, "needs --launcher ssh or mpi"),
        (
            {"interface": "lo", "launcher": "local"},
            "--launcher ssh, slurm or mpi, or --profile; ",
        ),
        (
            {"hosts": "node1:2", "nodes": 1},
            "needs --launcher slurm, or --profile",
        ),
        (
            {"hosts": "node1:2", "launcher": "slurm"},
            "needs --launcher ssh or mpi; this",
        ),
        (
            {"hosts": "node1:2", "launcher_options": "-v"},
            "--launcher-options -v needs --launcher slurm or mpi; this is",
        ),
        ({"launcher": "mpi", "launcher_options": "'"}, "No closing quotation"),
        ({"launcher": "mpi", "launcher_options": 3}, "launcher_options is 3"),
        ({"launcher": "mpi"}, "--launcher mpi needs --hosts"),
        ({"launcher": "slurm", "nodes": 0}, "nodes is 0"),
        ({"profile": "one"}, "--profile one and --launcher ssh exclude each other"),
        (
            {"profile": "one", "launcher": "local", "hosts": "node1:2"},
            "--hosts node1:2 needs --launcher ssh or mpi; this is --profile one",
        ),
        ({"profile": "nothing"}, "there are: one. `ipython profile create --parallel"),
        ({"profile": 3}, "--profile 3: there is no such profile"),
        ({"launcher": "rsh"}, "rsh"),
    ],
)
def test_hosts_that_cannot_be_are_refused(
    options: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    (tmp_path / "profile_one").mkdir()
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError, match=re.escape(words)):
        Lab(**{"launcher": "ssh", **options})
    assert psutil.Process().children(recursive=True) == before


def test_another_number_of_ranks_has_an_example_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    ssh = Ssh(parse_hosts("node1:2,node2:2"))
    now = {"node1": 2, "node2": 2}
    with pytest.raises(ValueError, match=r"is on node1:2,node2:2; .* node1:3,node2:2$"):
        ssh.for_ranks(5, now)
    with pytest.raises(ValueError, match=r"--hosts node1:1$"):
        ssh.for_ranks(1, now)


@pytest.mark.parametrize(
    ("text", "found"),
    [("2", [2]), ("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("4,1(x2)", [4, 1, 1])],
)
def test_tasks_of_slurm_are_read(text: str, found: list[int]) -> None:
    assert tasks_of(text) == found


def test_a_job_around_is_known_with_the_tasks_that_were_asked_for() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    tasks = {"SLURM_TASKS_PER_NODE": "2(x2)"}
    assert job_around({}) is None
    # One for each core, of which nobody has said a word.
    assert job_around({**job, **tasks}) == Job("7", "n[1-2]", "")
    asked = {**job, **tasks, "SLURM_NTASKS": "4"}
    assert job_around(asked) == Job("7", "n[1-2]", "2(x2)")
