"""What a script leaves running: waited for or ended, as at the end of its process."""

import contextlib
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from labkit import timeouts
from labkit.compat.threads import is_of_pool
from labkit.rank.scripts.modules import OwnModules


def waiting_for_threads() -> Callable[[], None]:
    """What waits for those threads that are started from now on, and that Python waits
    for at the end of a process."""
    before = set(threading.enumerate())

    def wait() -> None:
        for each in threading.enumerate():
            if each not in before and not each.daemon and not is_of_pool(each):
                each.join()

    return wait


@contextlib.contextmanager
def own_children(modules: OwnModules) -> Iterator[None]:
    """After this block no process runs that code of the script itself has started.

    One that is no daemon is waited for, unless an error ends the block. Those that a
    library starts, as a DataLoader's workers, end with what they are for.
    """
    started: list[BaseProcess] = []
    start = BaseProcess.start

    def own_start(process: BaseProcess) -> Any:
        start(process)
        if modules.has_file(sys._getframe(1).f_code.co_filename):
            started.append(process)

    BaseProcess.start = own_start  # type: ignore[method-assign]
    try:
        yield
        for each in started:
            if not each.daemon:
                each.join()
    finally:
        BaseProcess.start = start  # type: ignore[method-assign]
        _end(started)


def _end(processes: list[BaseProcess]) -> None:
    for each in processes:
        with contextlib.suppress(ValueError):  # the script has closed it
            each.terminate()
    for each in processes:
        with contextlib.suppress(ValueError):
            each.join(timeouts.END_S)
            each.kill()
