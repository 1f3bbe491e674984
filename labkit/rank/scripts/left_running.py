"""What a script leaves running: waited for or ended, as at the end of its process."""

import concurrent.futures
import contextlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from concurrent.futures import Future
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

from labkit import timeouts
from labkit.rank.scripts.modules import OwnModules


class Started:
    """The threads and child processes that a script itself has started, and what was
    submitted to pools, by a library too: a checkpoint is saved so.

    What else a library starts, as a DataLoader's workers, ends with what it is for.
    """

    def __init__(self, modules: OwnModules) -> None:
        self._modules = modules
        self._threads: list[threading.Thread] = []
        self._processes: list[BaseProcess] = []
        self._pending: set[Future[Any]] = set()
        self._is_to_wait = False

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is started in this block, after which none of the processes runs:
        after `wait_for_threads` those that are no daemons have ended by themselves."""
        restore = [
            self._note(threading.Thread, self._threads),
            self._note(BaseProcess, self._processes),
        ]
        submits = [
            self._note_submitted(each)
            for each in (ThreadPoolExecutor, ProcessPoolExecutor)
        ]
        try:
            yield
            for each in self._processes:
                if self._is_to_wait and not each.daemon:
                    each.join()
        finally:
            for cls, start in restore:
                cls.start = start
            for pool, submit in submits:
                pool.submit = submit  # type: ignore[method-assign]
            self._end_processes()

    def _note(self, cls: Any, started: list[Any]) -> tuple[Any, Any]:
        start = cls.start

        def noted(self_: Any) -> None:
            start(self_)
            if self._modules.has_file(sys._getframe(1).f_code.co_filename):
                started.append(self_)

        cls.start = noted
        return cls, start

    def _note_submitted(self, pool: type[Executor]) -> tuple[type[Executor], Any]:
        submit = pool.submit

        def noted(*args: Any, **kwargs: Any) -> Future[Any]:
            future = submit(*args, **kwargs)
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
            return future

        pool.submit = noted  # type: ignore[method-assign]
        return pool, submit

    def wait_for_threads(self) -> None:
        """Wait for those threads that Python waits for at the end of a process, and
        for what pools have to do."""
        self._is_to_wait = True
        for each in self._threads:
            if not each.daemon:
                each.join()
        while pending := list(self._pending):  # what they do may submit more meanwhile
            concurrent.futures.wait(pending)

    def _end_processes(self) -> None:
        for each in self._processes:
            with contextlib.suppress(ValueError):  # the script has closed it
                each.terminate()
        for each in self._processes:
            with contextlib.suppress(ValueError):
                each.join(timeouts.END_S)
                each.kill()
