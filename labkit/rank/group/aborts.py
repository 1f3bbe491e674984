"""Aborts communicators, each in a thread of its own, and waits for so long at most."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


class Aborts:
    """Aborts of process groups that may not end: `ncclCommAbort` can wait for the
    device, which waits for the collective of another communicator.

    Source: https://github.com/NVIDIA/nccl/issues/1013,
    https://github.com/pytorch/pytorch/issues/119797
    """

    def __init__(self) -> None:
        self._threads: dict[Any, threading.Thread] = {}

    def start(self, groups: Mapping[Any, str]) -> None:
        """Abort those groups whose abort is not under way, by their names in order."""
        self._threads = {g: t for g, t in self._threads.items() if t.is_alive()}
        for group in in_order(groups):
            if group not in self._threads:
                thread = threading.Thread(
                    target=group.abort, name="labkit-abort", daemon=True
                )
                self._threads[group] = thread
                thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all that were started have ended, after this time at most."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads.values())


def in_order(groups: Mapping[Any, str]) -> list[Any]:
    """The default group first: what hangs is most often there, and what waits for the
    device waits for that; the others by their names, alike on all ranks."""
    return sorted(
        groups, key=lambda group: (group is not dist.group.WORLD, groups[group])
    )
