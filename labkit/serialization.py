"""Values as bytes, for a process that has not their GPU, group or classes."""

import ctypes
import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle

LARGE_BYTES = 2**16
"""The memory of a tensor or array that has more follows its pickle, not copied into
it: PEP 574."""


class PortablePickler(cloudpickle.Pickler):
    """Pickles functions and classes of a notebook by value, and torch's by content.

    A tensor goes by way of the CPU, a model wrapped in DistributedDataParallel as
    the plain model: neither could be loaded elsewhere as it is. Tensors over the same
    memory, as tied weights in a state dict, are so there, too. But a view of a part
    goes without the rest, as a parameter of DeepSpeed's flat buffer: torch's own pickle
    has the whole buffer with each.
    """

    def __init__(
        self,
        file: Any,
        protocol: int | None = None,
        buffer_callback: Callable[[Any], Any] | None = None,
        following: set[int] | None = None,
    ) -> None:
        """`following` gets the ids of the buffers of tensors and arrays, which are
        copied when these are made again. A value of another kind would keep what is
        read, and with it a file open, or could not write to it."""
        super().__init__(file, protocol, buffer_callback)
        self._following = set() if following is None else following
        self._copies: dict[Any, tuple[Any, Any]] = {}
        """By place: memory of a GPU, or a part of memory, and a tensor that is its copy
        on the CPU. The memory would else be another's in a moment, with its address."""
        self._memories: dict[tuple[int, int], _Memory] = {}
        """On the CPU, by address and size: NumPy's views have storages of their own."""

    def reducer_override(self, value: Any) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray:
            return self._reduced_array(value)
        if torch is None or isinstance(value, type):
            return super().reducer_override(value)
        if isinstance(value, torch.nn.parallel.DistributedDataParallel):
            return _same, (value.module,)
        if isinstance(value, _Memory):
            self._note(value.buffer)
            return _storage, (value.buffer,)
        if isinstance(value, torch.Tensor):
            here = self._here(value)
            if _is_plain(here):
                return _tensor, (self._memory(here), *_made_of(here))
            if here is not value:
                return here.__reduce_ex__(_PROTOCOL)
        return super().reducer_override(value)

    def _reduced_array(self, array: Any) -> Any:
        reduced = array.__reduce_ex__(_PROTOCOL)
        make, (memory, *rest), *state = reduced
        if isinstance(memory, pickle.PickleBuffer) and self._note(memory):
            return _array, (make, memory, *rest), *state
        return reduced

    def _memory(self, tensor: Any) -> "_Memory":
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        return self._memories.setdefault(place, _Memory(storage))

    def _here(self, tensor: Any) -> Any:
        """A tensor on the CPU, without the rest of its storage: itself, if it is so."""
        import torch

        is_part = _is_part(tensor)
        if tensor.device.type in ("cpu", "meta") and not is_part:
            return tensor
        if _is_dense(tensor):
            here = self._copy(tensor, is_part)
        else:
            here = tensor.detach().cpu()
        here.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            here = torch.nn.Parameter(here.detach(), tensor.requires_grad)
        return here

    def _copy(self, tensor: Any, is_part: bool) -> Any:
        """Of a dense tensor, over the same memory as any other copy of this memory or
        of this part of it."""
        import torch

        storage, size, stride = tensor.untyped_storage(), tensor.size(), tensor.stride()
        place = (tensor.device, storage.data_ptr(), storage.nbytes())
        extent = (tensor.dtype, tensor.storage_offset(), size, stride)
        key = (*place, *extent) if is_part else place
        if key not in self._copies:
            copied = tensor.detach().to("cpu", copy=True) if is_part else storage.cpu()
            self._copies[key] = storage, copied
        _, copied = self._copies[key]
        if is_part:
            return copied.detach()
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(copied, tensor.storage_offset(), size, stride)

    def _note(self, memory: pickle.PickleBuffer) -> bool:
        """Whether it follows the pickle. What is read-only stays so within it."""
        raw = memory.raw()
        follows = len(raw) > LARGE_BYTES and not raw.readonly
        if follows:
            self._following.add(id(memory))
        return follows


_PROTOCOL = 5
_WRITE_BYTES = 2**26
"""What a bar waits for."""


def _is_part(tensor: Any) -> bool:
    """Whether a tensor is a part of a storage that has more."""
    return (
        _is_dense(tensor)
        and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    )


def _is_dense(tensor: Any) -> bool:
    """Whether its values are in memory as they are."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_nested or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _is_plain(tensor: Any) -> bool:
    """Whether it is nothing but memory of the CPU, of which there is some."""
    return (
        _is_dense(tensor)
        and tensor.device.type == "cpu"
        and tensor.untyped_storage().nbytes() > 0
        and not tensor.__dict__
    )


def _made_of(tensor: Any) -> tuple[Any, ...]:
    """What `_tensor` makes it again of, besides its whole memory."""
    import torch

    torch.utils.hooks.warn_if_has_hooks(tensor)
    return (
        *(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()),
        *(tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)),
    )


def _storage(memory: Any) -> Any:
    import torch

    byte = torch.uint8
    return torch.UntypedStorage.from_buffer(memory, byte_order="native", dtype=byte)


def _tensor(
    storage: Any,
    dtype: Any,
    offset: int,
    size: Any,
    stride: Any,
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    import torch

    # On the CPU, whatever torch.set_default_device says.
    empty = torch.empty(0, dtype=dtype, device="cpu")
    tensor = empty.set_(storage, offset, size, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


class _Memory:
    """That of tensors, which is pickled once for all of them.

    The buffer of `Tensor.numpy` would be one, after which no tensor of this storage
    could be resized.
    """

    def __init__(self, storage: Any) -> None:
        memory = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
        memory.storage = storage  # for as long as it is used
        self.buffer = pickle.PickleBuffer(memory)


def _array(make: Callable[..., Any], *arguments: Any) -> Any:
    """What numpy makes of memory, in memory of its own: a file would stay open."""
    return make(*arguments).copy(order="K")


def _same(value: Any) -> Any:
    return value


class Pickled:
    """A pickled value: a header, its pickle, and the memory of what is large in it,
    which is that of the value itself and not a copy.

    Attributes
    ----------
    parts : list of memoryview
        All that `loads` takes, in order.
    """

    def __init__(self, pickled: bytes, buffers: Sequence[pickle.PickleBuffer]) -> None:
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        header = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
        self.parts = [memoryview(header), *parts]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)

    def write_to(
        self, path: Path, on_written: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        """Write it to a file; `on_written` is called with the bytes of each write."""
        with path.open("wb") as file:
            for part in self.parts:
                for start in range(0, len(part), _WRITE_BYTES):
                    on_written(file.write(part[start : start + _WRITE_BYTES]))


def pickled(
    value: Any, what: str = "this", instead: str = "make it there instead"
) -> Pickled:
    """`value` for `loads`, which makes it again in any process with labkit.

    Raises ValueError for what belongs to this process: a lock, an open file, a lab. It
    says `what` that is, and what to do `instead`.
    """
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    following: set[int] = set()

    def is_within(memory: pickle.PickleBuffer) -> bool:
        if follows := id(memory) in following:
            buffers.append(memory)
        return not follows

    try:
        PortablePickler(stream, _PROTOCOL, is_within, following).dump(value)
    except Exception as error:  # whatever a value's own __reduce__ may raise
        raise ValueError(
            f"{what} cannot be sent to another process: {error}; {instead}"
        ) from error
    return Pickled(stream.getvalue(), buffers)


def pickled_by_name(values: Mapping[str, Any], instead: str) -> Pickled:
    """`values` for `loads`; the ValueError names the first of them that cannot be."""
    try:
        return pickled(values)
    except ValueError:
        for name, value in values.items():
            pickled(value, name, instead)
        raise


def dumps(value: Any) -> bytes:
    """What `pickled` gives, in one piece."""
    return bytes(pickled(value))


def loads(payload: bytes | bytearray | memoryview) -> Any:
    """What `pickled` was given. ValueError where it cannot be made in this process."""
    rest = memoryview(payload).toreadonly()
    [num_parts] = struct.unpack_from("<Q", rest)
    header = struct.Struct(f"<{num_parts + 1}Q")
    sizes = header.unpack_from(rest)[1:]
    rest = rest[header.size :]
    parts = []
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    try:
        return cloudpickle.loads(parts[0], buffers=parts[1:])
    except (Exception, SystemExit) as error:  # whatever a value runs when it is made
        raise ValueError(
            f"this cannot be loaded in another process: {type(error).__name__}: {error}"
        ) from error


class MemoryFile:
    """What is pickled, in memory that this user's other processes can open by a path.

    They are there until it is closed or this process ends, so that none are left
    behind. OSError where the system has no such files (it is Linux's memfd_create) or
    no memory.
    """

    def __init__(self, payload: Pickled) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("no files in memory on this system")
        self._file = io.FileIO(os.memfd_create("labkit"), "w")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
        try:
            for rest in payload.parts:
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
