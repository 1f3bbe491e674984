"""A rank's side of `%dist_push`, `%dist_pull` and `%dist_estimate`."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from labkit import serialization
from labkit.compat.torch import tree_leaves
from labkit.compat.torch import tree_map_only
from labkit.estimate import forecast
from labkit.rank.engine.rpc import runner
from labkit.rank.group.recovery import check_groups_of
from labkit.rank.loop.arguments import is_fully_sharded
from labkit.strategies.relay.parameters import StagedParameter
from labkit.strategies.relay.parameters import pipeline_of
from labkit.strategies.zero.engines import full_state_dict
from labkit.strategies.zero.engines import is_zero

MODEL = (
    "pull it with --full, which gives its whole state dict, or save it in a %%dist "
    "cell with save_checkpoint"
)
OTHER = (
    "take values from it in a %%dist cell, as numbers, tensors or a state_dict(), and "
    "pull those"
)
"""What to do instead of pulling what cannot be pickled."""


def push(payload: bytes | memoryview) -> None:
    """Put pickled names and values into this rank's namespace."""
    runner().shell.user_ns.update(serialization.loads(payload))


def push_file(path: str) -> bool:
    """`push` what is in a file; whether this process may open it."""
    try:
        payload = serialization.mapped(Path(path))
    except OSError:
        return False
    push(payload)
    return True


_parts: list[bytes] = []
"""Of a payload that comes in parts."""
_outgoing: list[bytes] = []
"""The payload that goes in parts, if one does."""
_files: list[serialization.MemoryFile] = []
"""The payload that goes by way of a file in memory, if one does."""
_written: list[Path] = []
"""The file on disk that another goes by way of, if one does: the notebook removes it,
unless it was interrupted before it was there."""


def push_part(part: bytes, is_first: bool) -> None:
    """Keep the next part of a payload."""
    if is_first:
        drop_parts()  # a kernel may have died before it came to the end of another
    _parts.append(part)


def push_parts() -> None:
    """`push` what the parts are of."""
    payload = b"".join(_parts)
    drop_parts()
    push(payload)


def drop_parts() -> None:
    """Keep no part of a payload that is through, or whose rest will not come."""
    _parts.clear()
    _outgoing.clear()
    while _files:
        _files.pop().close()
    while _written:
        _written.pop().unlink(missing_ok=True)


def missing(names: list[str]) -> list[str]:
    """Those of `names` that this rank has no variable for."""
    return [name for name in names if name not in runner().shell.user_ns]


def is_sharded(name: str) -> bool:
    """Whether this rank has but a part of the variable: to gather it is collective.
    ValueError for parts that do not make a whole any more."""
    value = runner().shell.user_ns[name]
    if isinstance(value, nn.Module):
        check_groups_of(value)
        is_in_parts = is_zero(value) or is_fully_sharded(value)
        return is_in_parts or pipeline_of(value) is not None
    return any(isinstance(leaf, DTensor) for leaf in leaves_of(value))


def has_shards(values: Iterable[Any]) -> bool:
    """Whether one of them is a tensor of which this rank has but a part."""
    return any(
        isinstance(each, DTensor)
        and not all(place.is_replicate() for place in each.placements)
        for each in values
    )


def has_stages(value: Any) -> bool:
    """Whether layers of it, or parameters in it, are on other ranks."""
    if isinstance(value, nn.Module):
        return pipeline_of(value) is not None
    return any(isinstance(leaf, StagedParameter) for leaf in leaves_of(value))


def leaves_of(value: Any) -> list[Any]:
    """What a value is made of; nothing of a list or a dict that holds itself."""
    try:
        return list(tree_leaves(value))
    except RecursionError:
        return []


def pull(
    name: str,
    full: bool,
    ranks: list[int],
    file: str,
    file_bytes: int,
    memory_bytes: int,
    part_bytes: int,
) -> tuple[int, bytes | str, bool] | None:
    """How long the pickled value of `name` is, and its first part; for one of more than
    `file_bytes` the file with all of it, where there is room: one in memory up to
    `memory_bytes`, which `drop_parts` closes, or else `file` and the rank. And whether
    tensors in it are but this rank's shards, as plain tensors.

    With `full` it is gathered whole, a collective; None on a rank that only takes part
    in that, being none of `ranks`, and where there is no such variable.
    """
    if name not in runner().shell.user_ns:
        return None
    value = runner().shell.user_ns[name]
    if full:
        value = gather_full(value)
    if runner().placement.rank not in ranks:
        return None
    instead = MODEL if isinstance(value, nn.Module) else OTHER
    if has_stages(value):  # of which this rank cannot ask the others alone
        raise ValueError(
            f"{name} cannot be sent to another process: its layers are in stages on "
            f"several ranks; {instead}"
        )
    if isinstance(value, nn.Module) and has_shards(value.parameters()):
        raise ValueError(
            f"{name} cannot be sent to another process: its parameters are sharded "
            f"over ranks; {instead}"
        )
    leaves = leaves_of(value)
    is_part = has_shards(leaves)
    has_any = any(isinstance(leaf, DTensor) for leaf in leaves)
    if has_any and not isinstance(value, nn.Module):
        # In another process a DTensor would have no group. (Only where there is one: a
        # list in two places would be two.)
        value = tree_map_only(DTensor, lambda each: each.detach().to_local(), value)
    payload = serialization.pickled(value, name, instead)
    drop_parts()
    if file_bytes < len(payload) <= memory_bytes:
        with contextlib.suppress(OSError):
            _files.append(serialization.MemoryFile(payload))
            return len(payload), str(_files[0].path), is_part
    if len(payload) > file_bytes:
        path = Path(f"{file}-{runner().placement.rank}")
        _written.append(path)
        try:
            payload.write_to(path)
        except OSError:  # the disk is full
            path.unlink(missing_ok=True)
        else:
            return len(payload), str(path), is_part
    whole = bytes(payload)
    if len(whole) > part_bytes:
        _outgoing.append(whole)
    return len(whole), whole[:part_bytes], is_part


def pull_part(start: int, num_bytes: int) -> bytes:
    """The next part of what `pull` has begun."""
    in_memory = (serialization.mapped(file.path) for file in _files)
    [payload] = _outgoing or in_memory
    return bytes(payload[start : start + num_bytes])


def forecast_variable(
    model: str, x: str | None, optimizer: str | None, options: dict[str, Any]
) -> bytes:
    """The pickled forecast for variables of this rank.

    An optimizer that is no variable is the name of a class.
    """
    names = runner().shell.user_ns
    return serialization.dumps(
        forecast(
            names[model],
            None if x is None else names[x],
            optimizer=names.get(optimizer, optimizer),
            **options,
        )
    )


def gather_full(value: Any) -> Any:
    """`value` with every shard gathered, on every rank.

    A model gives its whole state dict, loadable in the plain model; a DTensor, and
    any DTensor in a list or dict, the whole tensor.
    """
    if isinstance(value, nn.Module) and is_zero(value):
        return full_state_dict(value)
    if isinstance(value, nn.Module) and (pipeline := pipeline_of(value)) is not None:
        return pipeline.whole_state()
    if isinstance(value, nn.Module):
        return get_model_state_dict(
            value, options=StateDictOptions(full_state_dict=True)
        )
    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), value)
