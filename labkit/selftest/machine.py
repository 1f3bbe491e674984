"""What is known of this machine, and what of it is worth a word."""

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import psutil

from labkit.control_groups import memory_limit
from labkit.host.devices import num_cores
from labkit.records import format_bytes
from labkit.selftest import seen_by_torch

PACKAGES = ("labkit", "torch", "deepspeed", "ipyparallel", "ipython", "ipykernel")
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_", "CUDA_", "PYTORCH_", "HIP_")
"""Of the environment variables that change how ranks run."""
TORCH_LOOKS_S = 60.0
SMALL_SHM_BYTES = 2**30
FEW_FILES = 4096
UNEVEN = 0.05
"""Of the memory of GPUs that count as alike."""
IN_USE = 0.1
"""Of a GPU's memory, by others: more is worth a word."""
CONTEXT_BYTES = 2**30
"""Of CUDA itself, at most, in the process that looks."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as torch sees it."""

    name: str
    memory: int
    free: int


@dataclass(frozen=True)
class Machine:
    """What was read of a machine; sizes are in bytes."""

    system: str = ""
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    """Those that this process may use."""
    memory: int = 0
    memory_limit: int | None = None
    """Of the control group, as a container or a Slurm job has."""
    shm: int | None = None
    """The size of /dev/shm, where there is one."""
    open_files: int | None = None
    """How many a process may open at most; None for any number."""
    environment: Mapping[str, str] = field(default_factory=dict)
    has_driver: bool = False
    """Whether NVIDIA's driver is loaded."""
    cuda: str | None = None
    """The CUDA version that torch is built for; None for a build without."""
    hip: str | None = None
    nccl: str = ""
    gpus: tuple[Gpu, ...] = ()
    no_peer_access: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs that do not reach each other's memory."""
    torch_says: tuple[str, ...] = ()
    """Warnings, or the error, of the look at the GPUs."""

    def describe(self) -> str:
        """In a line: "2 cores, 23.5 GiB, no GPU; Linux, Python 3.11.2, torch ..."."""
        gpus: dict[str, int] = {}
        for gpu in self.gpus:
            name = f"{gpu.name} ({format_bytes(gpu.memory)})"
            gpus[name] = gpus.get(name, 0) + 1
        parts = [f"{count} x {name}" for name, count in gpus.items()] or ["no GPU"]
        hardware = [
            f"{self.cores} core{'s' * (self.cores != 1)}",
            format_bytes(self.memory),
            *parts,
        ]
        software = [self.system, f"Python {self.python}"]
        software += [f"{name} {version}" for name, version in self.versions.items()]
        software += [f"CUDA {self.cuda}"] if self.cuda else []
        software += [f"ROCm {self.hip}"] if self.hip else []
        software += [f"NCCL {self.nccl}"] if self.nccl else []
        return f"{', '.join(hardware)}; {', '.join(software)}"


@dataclass(frozen=True)
class Finding:
    """What is worth a word, and what to do about it."""

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}: {self.advice}"


# ---- read ----


def read_machine() -> Machine:
    """Read what there is to know; takes as long as an import of torch."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = Path("/dev/shm")
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions=dict(_versions()),
        cores=num_cores(),
        memory=psutil.virtual_memory().total,
        memory_limit=memory_limit(),
        shm=shutil.disk_usage(shm).total if shm.is_dir() else None,
        open_files=None if soft == resource.RLIM_INFINITY else soft,
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES)
        },
        has_driver=Path("/proc/driver/nvidia/version").exists(),
        **ask_torch(),
    )


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def ask_torch() -> dict[str, Any]:
    """What torch sees, as fields of a `Machine`."""
    command = [sys.executable, "-P", seen_by_torch.__file__]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TORCH_LOOKS_S, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        said = f"torch has not listed the GPUs after {TORCH_LOOKS_S:g} s"
        return {"torch_says": (said,)}
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        said = lines[-1] if lines else f"exit status {error.returncode}"
        return {"torch_says": (f"torch cannot list the GPUs: {said}",)}
    return {
        "cuda": found["cuda"],
        "hip": found["hip"],
        "nccl": found.get("nccl", ""),
        "gpus": tuple(Gpu(**each) for each in found["gpus"]),
        "no_peer_access": tuple((one, other) for one, other in found["no_peer_access"]),
        "torch_says": tuple(found["warnings"]),
    }


# ---- judge ----


def find(machine: Machine, *, num_ranks: int, device: str) -> list[Finding]:
    """What is worth a word, for so many ranks on "cpu" or "cuda"."""
    return [
        *_of_the_driver(machine),
        *_of_the_gpus(machine),
        *(_of_nccl(machine) if device == "cuda" else ()),
        *_of_threads(machine, num_ranks, device),
        *_of_limits(machine),
    ]


def _of_the_driver(machine: Machine) -> Iterator[Finding]:
    has_build = machine.cuda or machine.hip
    if machine.has_driver and not machine.gpus:
        if not has_build:
            yield Finding(
                "torch is a build without CUDA, and NVIDIA's driver is loaded",
                "ranks run on the CPU; install a CUDA build of torch to use the GPUs",
            )
        elif machine.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            yield Finding(
                "CUDA_VISIBLE_DEVICES hides every GPU",
                "unset it, or list the GPUs to use, for example "
                "CUDA_VISIBLE_DEVICES=0,1",
            )
        elif not any("driver" in said for said in machine.torch_says):
            yield Finding(
                f"torch is built for CUDA {machine.cuda}, and sees no GPU",
                "see whether nvidia-smi lists them, and whether this container was "
                "given any (docker run --gpus all)",
            )
    for said in machine.torch_says:
        is_old = "driver" in said and "too old" in said
        # A CUDA build on a machine without a GPU says so: that is no news.
        if "no NVIDIA driver" in said and not machine.has_driver:
            continue
        yield Finding(
            said.rstrip("."),
            f"update NVIDIA's driver, or install a torch built for an older CUDA than "
            f"{machine.cuda}"
            if is_old
            else "torch says this when it looks for GPUs",
        )


def _of_the_gpus(machine: Machine) -> Iterator[Finding]:
    gpus = machine.gpus
    if not gpus:
        return
    names = sorted({gpu.name for gpu in gpus})
    sizes = [gpu.memory for gpu in gpus]
    if len(names) > 1 or min(sizes) < (1 - UNEVEN) * max(sizes):
        told = ", ".join(
            f"{number}: {gpu.name}, {format_bytes(gpu.memory)}"
            for number, gpu in enumerate(gpus)
        )
        yield Finding(
            f"the GPUs are uneven ({told})",
            "every step waits for the slowest, and the smallest sets the batch; choose "
            "like ones with CUDA_VISIBLE_DEVICES",
        )
    yield from in_use(machine)
    if machine.no_peer_access:
        pairs = ", ".join(f"{one} and {other}" for one, other in machine.no_peer_access)
        yield Finding(
            f"NCCL: no P2P between the GPUs {pairs}",
            "what they send goes through the host's memory. nvidia-smi topo -m shows "
            "the links; in a virtual machine P2P needs ACS switched off",
        )


def in_use(machine: Machine) -> Iterator[Finding]:
    """The GPUs of which others use a part that counts."""
    for number, gpu in enumerate(machine.gpus):
        used = gpu.memory - gpu.free
        if used > max(IN_USE * gpu.memory, CONTEXT_BYTES):
            whole = format_bytes(gpu.memory)
            yield Finding(
                f"{format_bytes(used)} of the {whole} of GPU {number} are in use",
                "nvidia-smi says by whom; a lab that runs counts too, until %dist_stop",
            )


def _of_nccl(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    for name, values, what in (
        ("NCCL_P2P_DISABLE", ("1",), "P2P"),
        ("NCCL_P2P_LEVEL", ("LOC", "0"), "P2P"),
        ("NCCL_SHM_DISABLE", ("1",), "shared memory"),
    ):
        value = environment.get(name)
        if value in values:
            yield Finding(
                f"NCCL: {what} disabled by {name}={value}",
                "collectives are slower for it; unset it unless they fail without",
            )
    if environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding(
            "CUDA_LAUNCH_BLOCKING=1",
            "every kernel is waited for, which is for debugging; unset it",
        )


def _of_threads(machine: Machine, num_ranks: int, device: str) -> Iterator[Finding]:
    said = machine.environment.get("OMP_NUM_THREADS")
    share = machine.cores // num_ranks
    if said is None:
        # On GPUs a rank has its share of the cores as it is.
        if device == "cpu" and share > 1:
            yield Finding(
                f"OMP_NUM_THREADS unset: a rank uses 1 thread, and has {share} cores",
                f"%dist_start --threads {share} uses them",
            )
    elif said.isdecimal() and int(said) * num_ranks > machine.cores:
        yield Finding(
            f"OMP_NUM_THREADS={said}: {num_ranks} ranks have {int(said) * num_ranks} "
            f"threads on {machine.cores} cores",
            f"set it to {max(share, 1)}",
        )


def _of_limits(machine: Machine) -> Iterator[Finding]:
    if machine.shm is not None and machine.shm < SMALL_SHM_BYTES:
        yield Finding(
            f"/dev/shm is {machine.shm / 2**20:.0f} MB",
            "workers of a DataLoader, and NCCL, need more: docker run --ipc=host, or "
            "--shm-size=8g",
        )
    if machine.open_files is not None and machine.open_files < FEW_FILES:
        yield Finding(
            f"a process may open {machine.open_files} files",
            "with many ranks or workers that is not enough: ulimit -n 65536 before "
            "the notebook starts",
        )
    limit = machine.memory_limit
    if limit is not None and limit < machine.memory:
        yield Finding(
            f"the control group may use {format_bytes(limit)} of the machine's "
            f"{format_bytes(machine.memory)}",
            "where all ranks together need more, the kernel kills one; ask the "
            "container, or Slurm, for more",
        )
