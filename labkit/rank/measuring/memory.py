"""Memory in use by this rank, cheap enough to read at every step."""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from typing import ClassVar

import psutil
import torch

from labkit import control_groups

_read_peak: Any = torch.cuda.max_memory_allocated
_reset_peak: Any = torch.cuda.reset_peak_memory_stats


def memory_reader(device: torch.device) -> Callable[[], int]:
    """A function that reads the bytes in use on `device`, in a few microseconds.

    On a GPU the bytes of live tensors (`torch.cuda.memory_allocated`), read again after
    20 ms: torch sorts all statistics to return one. On the CPU the resident set of
    the process.
    """
    if device.type == "cuda":
        return at_most_every(0.02, lambda: torch.cuda.memory_allocated(device))
    statm = Path("/proc/self/statm")
    if not statm.exists():
        process = psutil.Process()
        return lambda: process.memory_info().rss
    descriptor = open_once(statm, os.getpid())
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return lambda: int(os.pread(descriptor, 64, 0).split()[1]) * page_bytes


@functools.cache
def open_once(file: Path, pid: int) -> int:
    """A descriptor of `file`, of this process: reading it again from the start costs a
    fifth of opening it."""
    return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def at_most_every(seconds: float, read: Callable[[], int]) -> Callable[[], int]:
    """`read`, but what it gave last while that is younger than `seconds`."""
    last, value = float("-inf"), 0

    def read_if_old() -> int:
        nonlocal last, value
        now = time.monotonic()
        if now - last >= seconds:
            last, value = now, read()
        return value

    return read_if_old


def memory_total(device: torch.device) -> int:
    """Bytes that `device` has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return control_groups.memory_total()


class PeakOfStep:
    """The peak of one step on a GPU: torch keeps a single one, which this resets.

    From the first on, `torch.cuda.max_memory_allocated` gives the greatest since the
    user's own reset, as it would without them.
    """

    _earlier: ClassVar[dict[int, int]] = {}
    """By device, the peak before ours were measured, since the user's own reset."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        number = number_of(device)
        PeakOfStep._keep()
        # With what came before, as it is patched.
        PeakOfStep._earlier[number] = torch.cuda.max_memory_allocated(device)
        _reset_peak(device)

    def read(self) -> int:
        """The peak since then."""
        return _read_peak(self._device)

    @classmethod
    def _keep(cls) -> None:
        if torch.cuda.max_memory_allocated is not _read_peak:
            return

        @functools.wraps(_read_peak)
        def read(device: Any = None) -> int:
            return max(_read_peak(device), cls._earlier.get(number_of(device), 0))

        @functools.wraps(_reset_peak)
        def reset(device: Any = None) -> None:
            cls._earlier.pop(number_of(device), None)
            _reset_peak(device)

        torch.cuda.max_memory_allocated = read
        torch.cuda.reset_peak_memory_stats = reset


def number_of(device: Any) -> int:
    """The number of a GPU, by any name that torch takes; the current one's for None."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index
