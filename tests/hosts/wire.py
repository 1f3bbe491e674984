"""A cable to a host that can lose packets, delay them, or let few through.

`python wire.py NAMESPACE OUTER INNER` connects a TAP device of this network namespace
with one of another, and says "ready". Each line on stdin is a JSON object: `loss` (0 to
1), `delay_s` (one way) and `bytes_per_s` (null for no limit), from then on.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from pathlib import Path

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_FRAME = 2**16
_STDIN = 0
_QUEUE_S = 0.5
"""What would wait for longer than that is lost, as in a switch."""


def tap(name: str) -> int:
    """The descriptor of a new TAP device of this thread's network namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, request)
    return device


def enter(namespace: str) -> None:
    """Go over to a network namespace that `ip netns` knows."""
    with Path("/run/netns", namespace).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def run(namespace: str, outer: str, inner: str) -> None:
    """Forward frames until stdin ends."""
    ends = [tap(outer)]
    enter(namespace)
    ends.append(tap(inner))
    print("ready", flush=True)
    loss, delay_s, bytes_per_s = 0.0, 0.0, None
    waiting: list[tuple[float, int, int, bytes]] = []
    free_at = [0.0, 0.0]
    number = 0
    while True:
        wait = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        ready, _, _ = select.select([*ends, _STDIN], [], [], wait)
        if _STDIN in ready:
            lines = os.read(_STDIN, _FRAME).splitlines()
            if not lines:
                return
            told = json.loads(lines[-1])
            loss, delay_s = told["loss"], told["delay_s"]
            bytes_per_s = told["bytes_per_s"]
        now = time.monotonic()
        for each in (0, 1):
            if ends[each] not in ready:
                continue
            frame = os.read(ends[each], _FRAME)
            if random.random() < loss or free_at[each] - now > _QUEUE_S:
                continue
            if bytes_per_s is not None:
                free_at[each] = max(free_at[each], now) + len(frame) / bytes_per_s
            number += 1
            due = max(free_at[each], now) + delay_s
            heapq.heappush(waiting, (due, number, 1 - each, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(waiting)
            try:
                os.write(ends[to], frame)
            except OSError:  # that end is down, or full
                continue


if __name__ == "__main__":
    run(*sys.argv[1:])
