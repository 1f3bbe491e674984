"""Gathers the ranks' plans of a save, as JSON.

`dist.all_gather_object` unpickles what comes, and gloo and NCCL ask nobody who it is.
"""

import json
from typing import TYPE_CHECKING
from typing import Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan


def all_gather_plans(
    plan: "SavePlan", path: str, error: str, group: dist.ProcessGroup | None
) -> list[tuple["SavePlan", str, str]]:
    """The plan of each rank of `group`, and what it says besides. Collective.

    Raises ValueError, KeyError or TypeError for what is no plan.
    """
    is_nccl = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else "cpu"
    payload = json.dumps([plan_to_json(plan), path, error]).encode()
    own = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    num_ranks = dist.get_world_size(group)
    sizes = torch.zeros(num_ranks, dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = own.numel()
    dist.all_reduce(sizes, group=group)
    largest = int(sizes.max())
    sent = own.new_zeros(largest)
    sent[: own.numel()] = own
    parts = [sent.new_empty(largest) for _ in range(num_ranks)]
    dist.all_gather(parts, sent, group=group)
    found = []
    for part, size in zip(parts, sizes.tolist(), strict=True):
        items, its_path, its_error = json.loads(part[:size].cpu().numpy().tobytes())
        found.append((plan_from_json(items), str(its_path), str(its_error)))
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


def plan_from_json(items: list[list[Any]]) -> "SavePlan":
    """The plan of which `plan_to_json` made this."""
    # Not with this module: it is a quarter of a second of every engine's start.
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.metadata import TensorProperties

    found = []
    for fqn, kind, *numbers, dtype in items:
        offsets, sizes, whole = map(torch.Size, numbers)
        data = planner.TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=dtype_of(dtype)),
            size=whole,
        )
        found.append(
            planner.WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=planner.WriteItemType[kind],
                tensor_data=data,
            )
        )
    return planner.SavePlan(found)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch writes as `name`; ValueError for another word."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found
