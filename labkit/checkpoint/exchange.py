"""Gathers the ranks' plans of a save, and takes them for nothing but plans."""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from labkit.compat.c10d import PLAN_NAMES


class PlanUnpickler(pickle.Unpickler):
    """Makes plans, and raises UnpicklingError for all else.

    Gloo and NCCL ask nobody who they are: what comes may be anything.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if is_known(module, name) else None
        if found is None:
            raise pickle.UnpicklingError(f"a plan has no {module}.{name}")
        return found


def is_known(module: str, name: str) -> bool:
    """Whether a plan may hold this."""
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return True
    return name in PLAN_NAMES.get(module, ())


def all_gather_plans(plan: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The plan of each rank of `group`. Collective.

    `dist.all_gather_object` would run whatever it is sent.
    """
    is_nccl = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else "cpu"
    own = torch.frombuffer(bytearray(pickle.dumps(plan)), dtype=torch.uint8).to(device)
    num_ranks = dist.get_world_size(group)
    sizes = torch.zeros(num_ranks, dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = own.numel()
    dist.all_reduce(sizes, group=group)
    largest = int(sizes.max())
    sent = own.new_zeros(largest)
    sent[: own.numel()] = own
    parts = [sent.new_empty(largest) for _ in range(num_ranks)]
    dist.all_gather(parts, sent, group=group)
    return [
        PlanUnpickler(io.BytesIO(part[:size].cpu().numpy().tobytes())).load()
        for part, size in zip(parts, sizes.tolist(), strict=True)
    ]
