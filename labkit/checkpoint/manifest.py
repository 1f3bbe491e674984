"""What `checkpoint.json` says: the tensors, their parts by file, and other values."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.checkpoint.atomic_folder import FILE_OF_RANK
from labkit.json_files import MAX_JSON_BYTES
from labkit.json_files import read_json
from labkit.records import format_bytes
from labkit.step_folders import MANIFEST

FORMAT = "labkit checkpoint"
VERSION = 1

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names that the safetensors format has for them."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """A block of a tensor that is in one file."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


def file_of_rank(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def write_manifest(folder: Path, entries: dict[str, Entry], values: Any) -> None:
    """Write `checkpoint.json`, down to the disk."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "tensors": {
            name: {
                "shape": entry.shape,
                "dtype": _NAMES[entry.dtype],
                "parts": [vars(part) for part in entry.parts],
            }
            for name, entry in entries.items()
        },
        "values": values,
    }
    text = json.dumps(content)
    if len(text) > (most := most_bytes(folder)):
        raise ValueError(
            f"its values are {format_bytes(len(text))} of JSON, and there is room for "
            f"{format_bytes(most)}; save lists of numbers as tensors"
        )
    with (folder / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def most_bytes(folder: Path) -> int:
    """How large `checkpoint.json` may be: the files of the ranks say as much of each
    tensor as that does."""
    files = [each for each in folder.iterdir() if FILE_OF_RANK.fullmatch(each.name)]
    return MAX_JSON_BYTES + sum(each.stat().st_size for each in files)


def read_manifest(folder: Path) -> tuple[dict[str, Entry], Any]:
    """The tensors and values of a checkpoint; ValueError if it cannot be one."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a checkpoint of labkit: it has no {MANIFEST}; give the "
            "folder of one, as save_checkpoint or --checkpoint wrote it"
        )
    try:
        content = read_json(path, most=most_bytes(folder))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged: {error}; load another checkpoint"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{path} does not describe a checkpoint of labkit; give the folder of one"
        )
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {content.get('version')!r:.20} of the format; this "
            f"labkit reads version {VERSION}: load it with the labkit that saved it"
        )
    try:
        entries = {
            name: _entry(described) for name, described in content["tensors"].items()
        }
        return entries, content["values"]
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(
            f"{path} is damaged: it does not describe its tensors; load another "
            "checkpoint"
        ) from None


def _entry(described: dict[str, Any]) -> Entry:
    shape = _sizes(described["shape"])
    parts = tuple(
        Part(each["file"], _sizes(each["offset"]), _sizes(each["shape"]))
        for each in described["parts"]
    )
    whole = sum(math.prod(part.shape) for part in parts) == math.prod(shape)
    apart = (
        len({part.offset for part in parts}) == len(parts) > 0
        # A file has a tensor once; of a part that is not looked at no size is known.
        and len({part.file for part in parts}) == len(parts)
    )
    if not apart or not whole or not all(_is_inside(part, shape) for part in parts):
        raise ValueError
    return Entry(shape, DTYPES[described["dtype"]], parts)


def _is_inside(part: Part, shape: tuple[int, ...]) -> bool:
    return (
        FILE_OF_RANK.fullmatch(part.file) is not None
        and len(part.offset) == len(part.shape) == len(shape)
        and all(
            begin + size <= whole
            for begin, size, whole in zip(part.offset, part.shape, shape, strict=True)
        )
    )


def _sizes(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(
        type(size) is int and 0 <= size < 2**63 for size in found
    ):
        raise ValueError
    return tuple(found)
