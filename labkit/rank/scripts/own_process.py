"""What a script may change in its process: new for it, and put back after it."""

import asyncio
import atexit
import builtins
import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from labkit.compat.ipython import no_running_loop
from labkit.compat.ipython import stderr_fd
from labkit.compat.torch import global_hooks
from labkit.rank.scripts.loggers import fresh_loggers
from labkit.rank.scripts.modules import OwnModules
from labkit.rank.telemetry.exceptions import run_all

_OF_SHELLS = ("get_ipython", "display")
"""What IPython adds to Python's own names."""


@contextlib.contextmanager
def own_process(
    arguments: Sequence[str],
    import_folder: str,
    directory: str | None,
    environment: dict[str, str],
    modules: OwnModules,
) -> Iterator[None]:
    """In this block code finds a process that was started for it.

    `arguments` become `sys.argv`, `import_folder` comes first in `sys.path`.
    """
    restore = [
        *_interpreter(),
        *_hooks(),
        *_descriptors(),
        *_cores(),
        fresh_loggers(modules),
        _environment(),
    ]
    at_exit = AtExit(modules)
    try:
        if directory is not None:
            os.chdir(directory)
        os.environ.update(environment)
        sys.argv = list(arguments)
        # The notebook's folder, which a shell has there, is not in a script's path.
        others = [each for each in sys.path if each not in ("", directory)]
        sys.path = [import_folder, *others]
        for name in _OF_SHELLS:
            vars(builtins).pop(name, None)
        vars(builtins).update({"exit": sys.exit, "quit": sys.exit})
        with (
            no_running_loop(),
            _own_warnings(),
            modules.read_again(),
            exits_are_raised(),
            at_exit.registering(),
            _own_handlers(),  # the last to begin: it ends first
        ):
            yield
    finally:
        error = run_all(restore)
        if error is not None:
            raise error


def _interpreter() -> list[Callable[[], Any]]:
    """What puts the interpreter's own state back."""
    argv, path, limit = sys.argv, sys.path, sys.getrecursionlimit()
    hooks = {name: getattr(sys, name) for name in ("excepthook", "unraisablehook")}
    thread_hook = threading.excepthook
    names = dict(vars(builtins))
    is_collecting, thresholds = gc.isenabled(), gc.get_threshold()
    method = multiprocessing.get_start_method(allow_none=True)
    policy = asyncio.get_event_loop_policy()
    mask = os.umask(0)
    os.umask(mask)
    trace, profile, interval = sys.gettrace(), sys.getprofile(), sys.getswitchinterval()
    is_tracing_memory, callbacks = tracemalloc.is_tracing(), gc.callbacks[:]
    numpy_errors, numpy_prints = np.geterr(), np.get_printoptions()

    def restore() -> None:
        sys.argv, sys.path = argv, path
        sys.setrecursionlimit(limit)
        for name, hook in hooks.items():
            setattr(sys, name, hook)
        threading.excepthook = thread_hook
        sys.settrace(trace)
        sys.setprofile(profile)
        sys.setswitchinterval(interval)
        if not is_tracing_memory:
            tracemalloc.stop()
        for name in vars(builtins).keys() - names.keys():
            del vars(builtins)[name]
        vars(builtins).update(names)
        gc.callbacks[:] = callbacks
        gc.set_threshold(*thresholds)
        (gc.enable if is_collecting else gc.disable)()
        os.umask(mask)
        np.seterr(**numpy_errors)
        np.set_printoptions(**numpy_prints)
        asyncio.set_event_loop_policy(policy)

    return [
        restore,
        lambda: multiprocessing.set_start_method(method, force=True),
    ]


@contextlib.contextmanager
def _own_warnings() -> Iterator[None]:
    """In this block filters of warnings may change, and where warnings go."""
    with warnings.catch_warnings():
        show = warnings.showwarning
        try:
            yield
        finally:
            if warnings.showwarning is not show:
                # Or the next script's call would find that it is done.
                logging.captureWarnings(False)


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """In this block handlers of signals may change; after it an alarm that is still to
    come ends, and a watchdog's, which would end the process."""
    before = {each: signal.getsignal(each) for each in signal.valid_signals()}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    log = stderr_fd()

    def restore() -> None:
        for each, handler in before.items():
            if handler is not None and signal.getsignal(each) != handler:
                signal.signal(each, handler)
                if each == signal.SIGALRM:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable(log)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    try:
        yield
    finally:
        for _ in before:
            try:
                restore()
            except BaseException:  # of one of the script's handlers, which is still set
                continue
            break
        else:
            restore()


def _descriptors() -> list[Callable[[], Any]]:
    """What puts the files back to which native code writes stdout and stderr."""
    kept = {each: os.dup(each) for each in (1, 2)}

    def restore(number: int) -> None:
        os.dup2(kept[number], number)
        os.close(kept[number])

    return [partial(restore, each) for each in kept]


def _cores() -> list[Callable[[], Any]]:
    """What lets every thread run on the cores again on which this one runs now."""
    if not hasattr(os, "sched_getaffinity"):  # pragma: no cover - Linux has it
        return []
    before = os.sched_getaffinity(0)

    def restore() -> None:
        if os.sched_getaffinity(0) == before:
            return
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), before)

    return [restore]


def _hooks() -> list[Callable[[], None]]:
    """What takes hooks of all modules and optimizers away that were added."""

    def remove(hooks: dict[Any, Any], before: dict[Any, Any]) -> None:
        for key in hooks.keys() - before.keys():
            del hooks[key]

    return [partial(remove, each, dict(each)) for each in global_hooks()]


def _environment() -> Callable[[], None]:
    """What puts variables and working directory back."""
    before = dict(os.environ)
    try:
        folder: str | None = str(Path.cwd())
    except FileNotFoundError:  # it was deleted
        folder = None

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        time.tzset()
        if folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(folder)

    return restore


class AtExit:
    """What the script itself registers with `atexit`, which runs at its end.

    What a library registers is for the end of the engine: the library stays.
    """

    def __init__(self, modules: OwnModules) -> None:
        self._modules = modules
        self._calls: list[tuple[Any, Any, Any]] = []

    @contextlib.contextmanager
    def registering(self) -> Iterator[None]:
        """Calls them when the block ends, the last one first."""
        register, unregister = atexit.register, atexit.unregister

        def own_register(function: Any, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals
            if not self._modules.has_file(caller.get("__file__")):
                return register(function, *args, **kwargs)
            self._calls.append((function, args, kwargs))
            return function

        def own_unregister(function: Any) -> None:
            self._calls = [each for each in self._calls if each[0] != function]
            unregister(function)

        atexit.register = own_register  # type: ignore[assignment]
        atexit.unregister = own_unregister
        try:
            yield
        finally:
            atexit.register, atexit.unregister = register, unregister
            while self._calls:
                function, args, kwargs = self._calls.pop()
                try:
                    function(*args, **kwargs)
                except Exception:  # as Python does: it is said, and the rest goes on
                    traceback.print_exc()


class AtOnceExit(SystemExit):
    """`os._exit`, which waits for no thread and no child."""


@contextlib.contextmanager
def exits_are_raised() -> Iterator[None]:
    """In this block `os._exit` of this process ends what runs, and not the engine."""
    leave, pid = os._exit, os.getpid()

    def raise_exit(code: int) -> Any:
        if os.getpid() == pid and threading.current_thread() is threading.main_thread():
            raise AtOnceExit(code)
        leave(code)

    os._exit = raise_exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


def end_fork(pid: int, error: BaseException | None) -> None:
    """End this process with the code that `error` says, where the script has forked it
    from process `pid`: it would go on as a second engine."""
    if os.getpid() == pid:
        return
    code: Any = error.code if isinstance(error, SystemExit) else error and 1
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code or 0)
