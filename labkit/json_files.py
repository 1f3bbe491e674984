"""Reads JSON that anybody may have written: of bounded size, and by type."""

import functools
import json
import types
import typing
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from labkit.checks import is_int
from labkit.checks import is_number
from labkit.checks import short_repr
from labkit.records import format_bytes

MAX_JSON_BYTES = 2**25
"""Of a file that says what others hold: what it makes in memory is 20 times as large at
worst, and in about a second."""
_SEQUENCES = (list, Sequence)
_MAPPINGS = (dict, Mapping)
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def read_json(path: Path, *, most: int = MAX_JSON_BYTES) -> Any:
    """What the file has. OSError or ValueError where that is not there, is no JSON, or
    is larger than `most` bytes."""
    if path.exists() and not path.is_file():  # a pipe would have us wait
        raise ValueError(f"{path} is not a file")
    with path.open("rb") as file:
        content = file.read(most + 1) if path.stat().st_size <= most else None
    if content is None or len(content) > most:
        raise ValueError(f"{path} is larger than {format_bytes(most)}")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:  # also of bytes that are no text
        raise ValueError(f"{path} is no JSON: {error}") from None


def parse(kind: Any, value: Any, name: str = "it") -> Any:
    """`value`, which JSON gave, as a `kind`: a dataclass, int, float, str, bool, None,
    or lists, dicts and unions of them. TypeError where it is none.

    Of a dataclass it takes what it knows: a later version may have written more. No
    number is negative in what labkit writes, unless it has a fraction.
    """
    args = typing.get_args(kind)
    origin = typing.get_origin(kind) or kind
    if origin is Any or origin is object:
        return value
    if origin is types.UnionType:
        for each in args:
            try:
                return parse(each, value, name)
            except TypeError:
                continue
    elif is_dataclass(origin) and isinstance(value, dict):
        hints = _hints(origin)
        found = {
            key: parse(hints[key], each, key)
            for key, each in value.items()
            if key in hints
        }
        return typing.cast(Any, origin)(**found)
    elif origin in _SEQUENCES and isinstance(value, list | tuple):
        return [parse(args[0], each, f"a part of {name}") for each in value]
    elif origin in _MAPPINGS and isinstance(value, dict):
        return {key: parse(args[1], each, key) for key, each in value.items()}
    elif origin is float and is_number(value):
        return float(value)
    elif origin is int and is_int(value):
        if 0 <= value < 2**64:
            return value
    elif origin in (str, bool, types.NoneType) and isinstance(value, origin):
        return value
    raise TypeError(f"{name} is {short_repr(value)}")
