"""Decides which rank gets which device, before anything is started."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from labkit.records import Placement

DEFAULT_CPU_RANKS = 2
BACKENDS = ("auto", "nccl", "gloo")
DEVICES = ("auto", "cuda", "cpu")


def count_gpus() -> int:
    """How many GPUs torch would see, without a CUDA context in this process."""
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.device_count()
    if not Path("/proc/driver/nvidia").exists() and not shutil.which("nvidia-smi"):
        return 0
    command = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(
            f"torch cannot count the GPUs: {''.join(reason)}; mend that, or leave them "
            "alone with --device cpu"
        )
    return int(done.stdout)


def place_ranks(
    num_ranks: int | None = None,
    *,
    backend: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    group_timeout_s: float = 1800.0,
    num_gpus: int | None = None,
) -> list[Placement]:
    """One placement a rank: a GPU each with NCCL, or the CPU with gloo.

    `num_ranks` is one per GPU by default, 2 without one. With the backend gloo
    several ranks may share a GPU. Raises ValueError for what cannot be.
    """
    if num_ranks is not None and (
        isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1
    ):
        raise ValueError(f"{num_ranks!r} ranks; choose 1 or more, as -n 2")
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose {', '.join(BACKENDS)}")
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; choose {', '.join(DEVICES)}")
    if threads is not None and threads < 1:
        raise ValueError(f"{threads} threads; choose 1 or more")
    if group_timeout_s <= 0:
        raise ValueError(f"group_timeout_s is {group_timeout_s}; it must be positive")
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
    if device == "cpu" and threads is None:
        # More would fight for the cores; OMP_NUM_THREADS is the user's own word.
        wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = int(wanted) if wanted.isdecimal() and int(wanted) else 1
    return [
        Placement(
            rank=rank,
            local_rank=rank,
            world_size=num_ranks,
            device=f"cuda:{rank % num_gpus}" if device == "cuda" else "cpu",
            backend=backend,
            num_threads=threads,
            group_timeout_s=group_timeout_s,
        )
        for rank in range(num_ranks)
    ]
