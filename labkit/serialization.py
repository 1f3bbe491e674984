"""Values as bytes, for a process that has not their GPU, group or classes."""

import io
import mmap
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle


class PortablePickler(cloudpickle.Pickler):
    """Pickles functions and classes of a notebook by value, and torch's by content.

    A tensor goes by way of the CPU, a model wrapped in DistributedDataParallel as
    the plain model: neither could be loaded elsewhere as it is. A view goes without the
    rest of its storage, as a parameter of DeepSpeed's flat buffer: torch's own pickle
    has the whole buffer with each.
    """

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and not isinstance(value, type):
            if isinstance(value, torch.nn.parallel.DistributedDataParallel):
                return _same, (value.module,)
            if isinstance(value, torch.Tensor) and (
                value.device.type not in ("cpu", "meta") or _is_part(value)
            ):
                here = value.detach()
                here = here.clone() if _is_part(value) else here.cpu()
                here.requires_grad_(value.requires_grad)
                if isinstance(value, torch.nn.Parameter):
                    here = torch.nn.Parameter(here.detach(), value.requires_grad)
                return here.__reduce_ex__(_PROTOCOL)
        return super().reducer_override(value)


_PROTOCOL = 5


def _is_part(tensor: Any) -> bool:
    """Whether a tensor on the CPU is a part of a storage that has more."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    )


def _same(value: Any) -> Any:
    return value


def dumps(
    value: Any, what: str = "this", instead: str = "make it there instead"
) -> bytes:
    """`value` as bytes; `loads` makes it again, in any process with labkit.

    Raises ValueError for what belongs to this process: a lock, an open file, a lab. It
    says `what` that is, and what to do `instead`.
    """
    buffer = io.BytesIO()
    try:
        PortablePickler(buffer, protocol=_PROTOCOL).dump(value)
    except Exception as error:  # whatever a value's own __reduce__ may raise
        raise ValueError(
            f"{what} cannot be sent to another process: {error}; {instead}"
        ) from error
    return buffer.getvalue()


def dumps_named(values: Mapping[str, Any], instead: str) -> bytes:
    """`values` as bytes; the ValueError names the first of them that cannot be."""
    try:
        return dumps(values)
    except ValueError:
        for name, value in values.items():
            dumps(value, name, instead)
        raise


def loads(payload: bytes | bytearray | memoryview) -> Any:
    """What `dumps` was given. ValueError where it cannot be made in this process."""
    try:
        return cloudpickle.loads(payload)
    except (Exception, SystemExit) as error:  # whatever a value runs when it is made
        raise ValueError(
            f"this cannot be loaded in another process: {type(error).__name__}: {error}"
        ) from error


class MemoryFile:
    """Bytes in memory that this user's other processes can open by a path.

    They are there until it is closed or this process ends, so that none are left
    behind. OSError where the system has no such files (it is Linux's memfd_create) or
    no memory.
    """

    def __init__(self, payload: bytes) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("no files in memory on this system")
        self._file = io.FileIO(os.memfd_create("labkit"), "w")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
        try:
            rest = memoryview(payload)
            while rest:
                rest = rest[self._file.write(rest) :]
            self.path.stat()  # there may be no /proc
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()


def mapped(path: Path) -> memoryview:
    """What is in a file, read as it is used; the file may be removed meanwhile."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
