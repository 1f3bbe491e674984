"""Gathers what ranks have to say, as JSON: their plans of a save, say.

`dist.all_gather_object` unpickles what comes, and gloo and NCCL ask nobody who it is.
"""

import json
from typing import TYPE_CHECKING
from typing import Any

import torch
import torch.distributed as dist

from labkit.json_files import parse

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.planner import WriteItem

MAX_BYTES = 2**30
"""Of what one rank says, as JSON."""


def all_gather_plans(
    plan: "SavePlan", path: str, error: str, group: dist.ProcessGroup | None
) -> list[tuple["SavePlan", str, str]]:
    """The plan of each rank of `group`, and what it says besides. Collective.

    Raises ValueError for what is no plan.
    """
    what = "a rank's plan of the save"
    found = []
    for said in all_gather_json([plan_to_json(plan), path, error], what, group):
        try:
            items, its_path, its_error = said
        except (TypeError, ValueError) as wrong:
            raise ValueError(f"{what} is none: {wrong}") from None
        found.append((plan_from_json(items), str(its_path), str(its_error)))
    return found


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors are that ranks of a group exchange."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_gather_json(
    value: Any, what: str, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """What each rank of `group` has given, in order of rank. Collective.

    Raises ValueError, in which `what` names it, for what is no JSON.
    """
    device = device_of_group(group)
    payload = json.dumps(value).encode()
    own = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    num_ranks = dist.get_world_size(group)
    sizes = torch.zeros(num_ranks, dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = own.numel()
    dist.all_reduce(sizes, group=group)
    largest = int(sizes.max())
    if not 0 < largest <= MAX_BYTES:
        raise ValueError(f"{what} has {largest:,} bytes")
    sent = own.new_zeros(largest)
    sent[: own.numel()] = own
    parts = [sent.new_empty(largest) for _ in range(num_ranks)]
    dist.all_gather(parts, sent, group=group)
    found = []
    for part, size in zip(parts, sizes.tolist(), strict=True):
        content = part[:size].cpu().numpy().tobytes()
        try:
            found.append(json.loads(content))
        except (RecursionError, ValueError) as wrong:
            raise ValueError(f"{what} is none: {wrong}") from None
    return found


def plan_to_json(plan: "SavePlan") -> list[list[Any]]:
    """For each part of a tensor in a plan: its name, type, offsets, sizes, the size of
    the whole, and the dtype."""
    found: list[list[Any]] = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None  # a save has tensors alone
        chunk, dtype = data.chunk, str(data.properties.dtype)
        numbers = [list(each) for each in (chunk.offsets, chunk.sizes, data.size)]
        found.append([item.index.fqn, item.type.name, *numbers, dtype])
    return found


def plan_from_json(items: Any) -> "SavePlan":
    """The plan of which `plan_to_json` made this; ValueError for what is none."""
    # Not with this module: it is a quarter of a second of every engine's start.
    from torch.distributed.checkpoint import planner

    try:
        return planner.SavePlan([_item(*parse(list[Any], each)) for each in items])
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"a rank's plan of the save is none: {error}") from None


def _item(
    fqn: str, kind: str, offsets: Any, sizes: Any, whole: Any, dtype: str
) -> "WriteItem":
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.metadata import TensorProperties

    shapes = [torch.Size(parse(list[int], each)) for each in (offsets, sizes, whole)]
    data = planner.TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=shapes[0], sizes=shapes[1]),
        properties=TensorProperties(dtype=dtype_of(parse(str, dtype))),
        size=shapes[2],
    )
    return planner.WriteItem(
        index=MetadataIndex(parse(str, fqn), shapes[0]),
        type=planner.WriteItemType[kind],
        tensor_data=data,
    )


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch writes as `name`; ValueError for another word."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return found
