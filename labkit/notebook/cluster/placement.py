"""Decides which rank gets which device, before anything is started."""

import ctypes
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from labkit import timeouts
from labkit.checks import UserError
from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import is_int
from labkit.checks import is_number
from labkit.checks import short_repr
from labkit.options import check_values
from labkit.options import option
from labkit.records import Placement
from labkit.records import format_bytes

DEFAULT_CPU_RANKS = 2
BACKENDS = ("auto", "nccl", "gloo")
DEVICES = ("auto", "cuda", "cpu")
MAX_THREADS = 1024
MAX_TIMEOUT_S = 1e7
RANK_BYTES = 200 * 2**20
"""What an idle rank on the CPU has to itself: torch, and an IPython kernel."""


def check_num_ranks(what: str, num_ranks: Any) -> None:
    """ValueError unless it is a number of ranks that this machine's memory holds."""
    if not is_int(num_ranks) or num_ranks < 1:
        raise ValueError(f"{short_repr(num_ranks)} ranks; choose 1 or more, as -n 2")
    memory = psutil.virtual_memory().total
    most = max(memory // RANK_BYTES, 1)
    if num_ranks > most:
        raise ValueError(
            f"{short_repr(num_ranks)} ranks, and the {format_bytes(memory)} of this "
            f"machine hold {most} at most, of {format_bytes(RANK_BYTES)} each when "
            "they are idle; choose fewer, as -n 2"
        )


def check_group_timeout(what: str, value: Any) -> None:
    """ValueError unless a process group can have this timeout."""
    if not (is_number(value) and 0 < value <= MAX_TIMEOUT_S):
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be a positive number of seconds, "
            f"{MAX_TIMEOUT_S:,.0f} at most"
        )


@dataclass(frozen=True)
class StartOptions:
    """What `%dist_start` says about the ranks, and `Lab` takes."""

    num_ranks: int | None = option(
        None,
        "how many ranks; by default one per visible GPU, or 2 on the CPU",
        check_num_ranks,
        metavar="N",
        short="-n",
    )
    backend: str = option(
        "auto",
        "what ranks communicate with: nccl needs a GPU for each rank; with gloo ranks "
        "may share one",
        partial(check_choice, choices=BACKENDS),
        choices=BACKENDS,
    )
    device: str = option(
        "auto",
        "where ranks compute: by default on GPUs where there are any; cpu leaves them "
        "alone",
        partial(check_choice, choices=DEVICES),
        choices=DEVICES,
    )
    threads: int | None = option(
        None,
        "torch threads of a rank for what it does on the CPU",
        partial(check_count, meaning="those of one rank", most=MAX_THREADS),
        metavar="T",
        default_text="OMP_NUM_THREADS, or 1; on GPUs its share of the cores",
    )
    group_timeout_s: float = option(
        timeouts.GROUP_S,
        "how many seconds a collective waits: the timeout of the process group",
        check_group_timeout,
        metavar="SECONDS",
        default_text=f"{timeouts.GROUP_S:g}",
    )


def count_gpus() -> int:
    """How many GPUs torch would see, without a CUDA context in this process.

    A process of its own asks torch, which knows what CUDA_VISIBLE_DEVICES and its like
    hide, and how a GPU is divided.
    """
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.device_count()
    if not has_driver(*torch_build()):
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise UserError(
            f"torch cannot count the GPUs: {''.join(reason)}; fix that, or leave the "
            "GPUs unused with --device cpu"
        )
    return int(done.stdout)


def torch_build() -> tuple[str | None, str | None]:
    """The versions of CUDA and of HIP (ROCm) that torch was built for, without the
    second or two that it takes to import it."""
    try:
        file = metadata.distribution("torch").locate_file("torch/version.py")
        version = runpy.run_path(str(file))
    except (metadata.PackageNotFoundError, OSError):
        return None, None
    return version.get("cuda"), version.get("hip")


def has_driver(cuda: str | None, hip: str | None) -> bool:
    """Whether a torch that was built for these can find a GPU at all: CUDA loads its
    driver by this name, and HIP opens this file."""
    if cuda is not None:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
        return True
    return hip is not None and Path("/dev/kfd").exists()


def num_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # on macOS


def place_ranks(
    options: StartOptions, *, num_gpus: int | None = None
) -> list[Placement]:
    """One placement a rank: a GPU each with NCCL, or the CPU with gloo.

    With the backend gloo several ranks may share a GPU. Raises ValueError for what
    cannot be.
    """
    check_values(options)
    num_ranks, threads = options.num_ranks, options.threads
    backend, device = options.backend, options.device
    if num_gpus is None:
        num_gpus = 0 if device == "cpu" else count_gpus()
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    if device == "cuda" and not num_gpus:
        raise ValueError(
            "--device cuda: no GPU is visible here; leave it out to use the CPU"
        )
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    if backend == "nccl" and device == "cpu":
        raise ValueError(
            "--backend nccl needs a GPU for each rank and these ranks are on the CPU; "
            "use --backend gloo, or leave it out"
        )
    if num_ranks is None:
        num_ranks = num_gpus if device == "cuda" else DEFAULT_CPU_RANKS
    if backend == "nccl" and num_ranks > num_gpus:
        gpus = "1 GPU is" if num_gpus == 1 else f"{num_gpus} GPUs are"
        raise ValueError(
            f"{num_ranks} ranks, but {gpus} visible and NCCL needs one for each rank; "
            f"use -n {num_gpus}, or --backend gloo to let several ranks share a GPU, "
            "or --backend gloo --device cpu to leave it alone"
        )
    if threads is None:
        # More would fight for the cores; OMP_NUM_THREADS is the user's own word.
        wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()[:9]
        own = 1 if device == "cpu" else num_cores() // num_ranks
        threads = int(wanted) if wanted.isdecimal() else own
        threads = min(max(threads, 1), MAX_THREADS)
    return [
        Placement(
            rank=rank,
            local_rank=rank,
            world_size=num_ranks,
            device=f"cuda:{rank % num_gpus}" if device == "cuda" else "cpu",
            backend=backend,
            num_threads=threads,
            group_timeout_s=options.group_timeout_s,
        )
        for rank in range(num_ranks)
    ]
