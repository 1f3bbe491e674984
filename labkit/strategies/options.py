"""What a magic line can ask of a model under any strategy."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from functools import partial
from typing import Any
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import BatchNormBase
from labkit.compat.torch import NormBase
from labkit.compat.torch import undo_compile
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.prepared import blocks

Undo = Callable[[], None]


@contextlib.contextmanager
def without_running_statistics(
    block: nn.Module, *, is_stand_in: bool = False
) -> Iterator[None]:
    """Leave the running statistics of BatchNorm and its like as they are: they have had
    this batch, or it is a stand-in, which adds nothing to those of all ranks anyway."""
    kept = [
        (buffer, buffer.clone())
        for module in block.modules()
        if has_running_statistics(module)
        if not (is_stand_in and getattr(module, "is_synchronized", False))
        for buffer in module.buffers()
    ]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)  # `data`, for the backward pass has saved it


def has_running_statistics(module: nn.Module) -> bool:
    return isinstance(module, NormBase) and module.running_mean is not None


def compile_blocks(model: nn.Module) -> list[Undo]:
    """`torch.compile` each of the model's blocks; equal ones are compiled once."""
    undo: list[Undo] = []
    for block in blocks(model) or [model]:
        block.compile()
        undo.append(partial(undo_compile, block))
    return undo


class BatchNorm(BatchNormBase):
    """BatchNorm whose statistics are in fp32 and, if asked for, those of all ranks.

    Torch's own takes no bf16 parameters beside fp32 statistics, which is what ZeRO and
    FSDP make of it, and its `SyncBatchNorm` needs a GPU.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015.
    """

    is_synchronized = False
    was_synchronized = False
    """Whether it stands for a SyncBatchNorm."""
    peers: ClassVar[Peers | None] = None
    """The ranks whose samples are in the batch of the run; None for all."""
    counts_here = True
    """Whether this rank's samples are in the batch, and are no stand-in: see
    `labkit.rank.data.dealing.Dealer`."""

    def _check_input_dim(self, x: torch.Tensor) -> None:
        """Any shape (N, C, ...) will do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        # On a GPU torch itself computes in fp32 what comes in less, without a copy.
        is_half = dtype in (torch.bfloat16, torch.float16)
        is_mixed = x.is_cuda and is_half and not self.is_synchronized
        x = x if is_mixed else x.float()
        if not (self.is_synchronized and self.training):
            weight = None if self.weight is None else self.weight.float()
            bias = None if self.bias is None else self.bias.float()
            return self._normalized_here(x, weight, bias).to(dtype)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = x.new_tensor([x.numel() / x.shape[1]])
        present = float(BatchNorm.counts_here)
        total = SumOverRanks.apply(present * torch.cat([x.sum(dims), count]))
        is_there = total[-1].detach() > 0  # one sample at least, on some rank
        count = total[-1].detach().clamp(min=1)
        mean = total[:-1] / count
        centred = x - mean.view(shape)
        variance = SumOverRanks.apply(present * centred.square().sum(dims)) / count
        share = self._share_of_this_batch(is_there)
        if self.running_mean is not None and self.running_var is not None:
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.detach(), share)
            self.running_var.lerp_(unbiased, share)
        normal = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            weight, bias = self.weight.float(), self.bias.float()
            normal = normal * weight.view(shape) + bias.view(shape)
        return normal.to(dtype)

    def _normalized_here(self, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        share = self._share_of_this_batch() if self.training else 0.0
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            weight,
            bias,
            self.training or self.running_mean is None,
            share,
            self.eps,
        )

    def _share_of_this_batch(self, is_there: Any = True) -> Any:
        """What this batch counts for in the running statistics: nothing where it has
        no samples."""
        if self.num_batches_tracked is None:
            return (self.momentum or 0.0) * is_there
        self.num_batches_tracked.add_(is_there)
        if self.momentum is None:
            return is_there / self.num_batches_tracked.clamp(min=1).item()
        return self.momentum * is_there


class SumOverRanks(torch.autograd.Function):
    """`all_reduce` with a gradient, which is all-reduced too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(gradient)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    if BatchNorm.peers is not None:
        return BatchNorm.peers.all_reduce(x.clone())
    total = x.clone()
    dist.all_reduce(total, group=dist.group.WORLD)
    return total


def own_forward(module: nn.Module) -> bool:
    """Whether this is a BatchNorm whose class computes something else than torch's."""
    plain = BatchNormBase.forward
    forward: Any = type(module).forward
    return forward not in (plain, nn.SyncBatchNorm.forward, BatchNorm.forward)


def wants_all_ranks(module: nn.Module) -> bool:
    """Whether this is a SyncBatchNorm, or what an earlier run made of one."""
    return isinstance(module, nn.SyncBatchNorm) or getattr(
        module, "was_synchronized", False
    )


def replace_batchnorm(
    model: nn.Module, *, synchronize: bool, is_fp32: bool
) -> list[str]:
    """Make every BatchNorm of a model keep its statistics in fp32, in place, where the
    model itself is in another precision, and with `synchronize` over the samples of
    all ranks. One that is a SyncBatchNorm does both, on any device.

    Returns the names of classes that were left as they are, for they have a forward
    of their own. ValueError where these would be to synchronize.
    """
    norms = [module for module in model.modules() if isinstance(module, BatchNormBase)]
    left = sorted({type(module).__name__ for module in norms if own_forward(module)})
    if left and synchronize:
        raise UnsupportedLoopError(
            f"--sync-batchnorm: {left[0]} has a forward of its own, in which labkit "
            "cannot take the statistics over all ranks; use torch's BatchNorm there, "
            "or leave out --sync-batchnorm"
        )
    for module in norms:
        was_synchronized = wants_all_ranks(module)
        is_synchronized = synchronize or was_synchronized
        is_needed = is_synchronized or not is_fp32
        kind: Any = type(module)
        if own_forward(module) or not (is_needed or isinstance(module, BatchNorm)):
            continue
        module.__class__ = batchnorm_like(kind)
        vars(module)["was_synchronized"] = was_synchronized
        vars(module)["is_synchronized"] = is_synchronized
    return [] if is_fp32 else left


@functools.cache
def batchnorm_like(kind: Any) -> Any:
    """BatchNorm as above that is also a `kind`: loops ask whether a module is a
    `torch.nn.BatchNorm1d`."""
    if issubclass(kind, BatchNorm):
        return kind
    if issubclass(kind, nn.SyncBatchNorm):  # which DDP refuses on a CPU
        return BatchNorm
    return type(kind.__name__, (BatchNorm, kind), {"__module__": BatchNorm.__module__})


def has_own_statistics(model: nn.Module, *, synchronize: bool) -> bool:
    """Whether a model has a BatchNorm over each rank's own samples alone."""
    return any(
        isinstance(module, BatchNormBase)
        and not (synchronize or wants_all_ranks(module))
        for module in model.modules()
    )


def watch_plain_batchnorm(see: Callable[[], None]) -> Undo:
    """Call `see` where one that `replace_batchnorm` has not had takes the statistics of
    a batch."""
    plain = BatchNormBase.forward

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        if module.training:
            see()
        return plain(module, x)

    BatchNormBase.forward = forward  # type: ignore[assignment,method-assign]
    return lambda: setattr(BatchNormBase, "forward", plain)


def keep_stand_ins_out(model: nn.Module) -> list[Undo]:
    """Leave running statistics as they are where the batch is a stand-in."""
    if not any(map(has_running_statistics, model.modules())):
        return []

    def without_stand_ins(plain: Forward) -> Forward:
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if BatchNorm.counts_here:
                return plain(module, *args, **kwargs)
            with without_running_statistics(module, is_stand_in=True):
                return plain(module, *args, **kwargs)

        return forward

    return [wrap_forward(model, without_stand_ins)]
