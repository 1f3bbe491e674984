"""What a script leaves in memory: written out and freed, as at the end of a process."""

import contextlib
import gc
import io
import os
import stat
import sys
from collections.abc import Iterable
from types import FunctionType
from types import ModuleType
from typing import Any

_KEPT = (FunctionType, type, ModuleType, bool, int, float, complex, str, bytes)
_OF_MODULES = ("__builtins__", "__spec__", "__loader__")


def forget_values(namespaces: Iterable[dict[str, Any]]) -> None:
    """Free what names of modules that have ended stand for: models, data, files.

    A library may keep one of their functions for good, as torch's compiler does, and
    with it all their names. It can still be called: the functions, classes, modules
    and constants stay.
    """
    in_use = {id(each) for each in _namespaces_of_threads()}
    for names in namespaces:
        if id(names) in in_use:
            continue
        for name, value in list(names.items()):
            # isinstance asks the value, too, which may be lazy, or a weak reference.
            if name not in _OF_MODULES and not issubclass(type(value), _KEPT):
                names[name] = None
    gc.collect()


def write_files() -> None:
    """Write what open files still have in their buffers: Python does when a process
    ends, and what keeps a file here may be kept for good."""
    for each in gc.get_objects():
        if not issubclass(type(each), io.IOBase):
            continue
        with contextlib.suppress(Exception):  # closed, or has no file
            # A pipe would wait for who reads it.
            if stat.S_ISREG(os.fstat(each.fileno()).st_mode):
                each.flush()


def _namespaces_of_threads() -> Iterable[dict[str, Any]]:
    """Those of the code that threads are running."""
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            yield inner.f_globals
            inner = inner.f_back
