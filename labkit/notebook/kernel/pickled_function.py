"""Packs a function of the notebook for the ranks."""

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from labkit import serialization
from labkit.compat.ipython import cell_numbers

Packed = tuple[bytes, bool, dict[str, tuple[Any, list[str]]]]


def pack_function(function: Callable[..., Any]) -> Packed:
    """What `labkit.rank.engine.rpc.receive_function` takes.

    The pickled function, with all of the notebook that it refers to; whether it is
    called with (rank, world_size); and the notebook's cells, for tracebacks.
    """
    with_rank = takes_rank(function)
    return serialization.dumps(function), with_rank, cell_sources()


def source_of(function: Callable[..., Any]) -> str:
    """The function's source; a call of it where there is none to be had."""
    inner = inspect.unwrap(getattr(function, "func", function))
    try:
        return textwrap.dedent(inspect.getsource(inner))
    except (OSError, TypeError):
        return f"{getattr(inner, '__name__', repr(inner))}()"


def takes_rank(function: Callable[..., Any]) -> bool:
    """Whether to call `function(rank, world_size)` rather than `function()`."""
    signature = inspect.signature(function)
    names = list(signature.parameters)

    def fits(*args: Any) -> bool:
        try:
            signature.bind(*args)
        except TypeError:
            return False
        return True

    if fits() and names[:1] != ["rank"]:
        return False
    if fits(0, 1):
        return True
    if fits():
        return False
    raise ValueError(
        f"{getattr(function, '__name__', 'the function')}{signature} is called as f() "
        "or f(rank, world_size); give its other parameters default values"
    )


def cell_sources() -> dict[str, tuple[Any, list[str]]]:
    """File name -> (cell number, lines) of the notebook's cells so far."""
    if "IPython" not in sys.modules:
        return {}
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return {}
    numbers = cell_numbers(shell)
    return {name: (numbers[name], linecache.getlines(name)) for name in numbers}
