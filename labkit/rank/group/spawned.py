"""Processes that a cell starts by `spawn` get the functions and classes of cells."""

import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

from labkit import serialization


def send_definitions() -> None:
    """Pickle what cells define by value where it goes to another process.

    By name it would be looked up in the other process's `__main__`. A script is run
    again there; cells cannot be, and each worker would die of its own AttributeError.
    """
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]


def _by_value(pickler: Any, value: Any) -> Any:
    if not isinstance(value, FunctionType | type) or value.__module__ != "__main__":
        return NotImplemented
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) is not None:  # the other process runs it
        return NotImplemented
    try:
        payload = serialization.dumps(value)
    except ValueError as error:
        raise pickle.PicklingError(f"{value.__qualname__}: {error}") from error
    return _received, (payload,)


def _received(payload: bytes) -> Any:
    """In the other process, from which instances may come back."""
    send_definitions()
    return serialization.loads(payload)
