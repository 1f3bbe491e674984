"""What labkit takes of Python's thread pools that is private."""

import threading
from concurrent.futures import thread as pools
from typing import Any

from labkit.compat.gate import Gate

GATE = Gate("python")


@GATE.needs("concurrent.futures.thread:_threads_queues")
def is_of_pool(thread: threading.Thread) -> bool:
    """Whether a thread is a pool's: these wait for work as long as the pool is there."""
    queues: Any = pools._threads_queues  # type: ignore[attr-defined]
    return thread in queues
