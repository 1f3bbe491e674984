"""What a magic line can ask of a model under any strategy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.checkpoint import checkpoint

from labkit.strategies.prepared import blocks

Undo = Callable[[], None]


def checkpoint_activations(model: nn.Module) -> list[Undo]:
    """Keep only the inputs of the model's blocks; compute the rest again in backward.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost";
    `torch.utils.checkpoint`.
    """
    undo: list[Undo] = []
    for block in blocks(model) or [model]:
        forward = block.forward

        def again(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        block.forward = again
        undo.append(partial(delattr, block, "forward"))
    return undo


def compile_blocks(model: nn.Module) -> list[Undo]:
    """`torch.compile` each of the model's blocks; equal ones are compiled once."""
    undo: list[Undo] = []
    for block in blocks(model) or [model]:
        block.compile()
        undo.append(partial(setattr, block, "_compiled_call_impl", None))
    return undo


class SyncBatchNorm(nn.SyncBatchNorm):
    """BatchNorm over the samples of all ranks, on the CPU as well.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015; torch's own
    `SyncBatchNorm` needs a GPU.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda or not self.training:
            return super().forward(x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = torch.tensor([x.numel() / x.shape[1]], dtype=x.dtype)
        total = all_reduce(torch.cat([x.sum(dims), count]))
        mean, count = total[:-1] / total[-1], total[-1].detach()
        centred = x - mean.view(shape)
        variance = all_reduce(centred.square().sum(dims)) / count
        if self.track_running_stats:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = self.momentum or 1.0 / float(self.num_batches_tracked)
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.detach(), share)
            self.running_var.lerp_(unbiased, share)
        normal = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal


def synchronize_batchnorm(model: nn.Module) -> None:
    """Make every BatchNorm of a model count the samples of all ranks, in place."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.__class__ = SyncBatchNorm
            module.process_group = dist.group.WORLD  # type: ignore[assignment]
