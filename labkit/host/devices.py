"""The GPUs and cores of this host, without a CUDA context in this process."""

import ctypes
import math
import os
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from labkit.checks import UserError
from labkit.control_groups import cpu_limit

ASK_DRIVER = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
if error in (0, 100):  # CUDA_ERROR_NO_DEVICE
    print(count.value)
else:
    import torch
    print(torch.cuda.device_count())
"""
"""Of a torch that is built for CUDA: what it would be told, without the seconds that it
takes to import it, but where the driver does not work."""
ASK_TORCH = "import torch; print(torch.cuda.device_count())"


def count_gpus() -> int:
    """How many GPUs torch would see, without a CUDA context in this process.

    A process of its own asks, as what answers knows what CUDA_VISIBLE_DEVICES and its
    like hide, and how a GPU is divided.
    """
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.device_count()
    cuda, hip = torch_build()
    if not has_driver(cuda, hip):
        return 0
    command = [sys.executable, "-P", "-c", ASK_TORCH if cuda is None else ASK_DRIVER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise UserError(
            f"the GPUs cannot be counted: {''.join(reason)}; fix that, or leave the "
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
    """The cores whose time this process may use: a container's may be fewer than those
    that it runs on."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1  # on macOS
    limit = cpu_limit() or math.inf
    return math.ceil(min(len(os.sched_getaffinity(0)), limit))
