"""Data parallelism: a replica on every rank, gradients averaged over the ranks."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def apply_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """Replicate `model` from rank 0 and average its gradients in every backward.

    Forward: identity. Backward: all-reduce of the gradients, in buckets, while the
    rest of the backward pass still runs.

    Source: Li et al., "PyTorch Distributed", VLDB 2020;
    `torch.nn.parallel.DistributedDataParallel`.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("ddp has nothing to do: no parameter requires a gradient")
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        # Gradients live in the buckets: one copy less of them in memory.
        gradient_as_bucket_view=True,
    )
