"""The stop button, pressed at a moment that a test chooses."""

import os
import signal
import threading
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Send this process a SIGINT, as a notebook's stop button does, as soon as
    `condition` holds within the block.

    One that came after the block would end pytest, and with it all tests that are left.
    """
    over = threading.Event()
    lock = threading.Lock()

    def wait_and_send() -> None:
        while not over.wait(0.01):
            if condition():
                with lock:
                    if not over.is_set():
                        os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=wait_and_send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        try:
            with lock:
                over.set()
            thread.join()
        except KeyboardInterrupt:
            raise AssertionError("the block ended as it was interrupted") from None
