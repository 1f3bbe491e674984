"""Data parallelism: a replica on every rank, gradients averaged over the ranks."""

import inspect

import torch
from torch.nn.parallel import DistributedDataParallel

from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import check_keys


class DDP(Prepared):
    """Replicate the model from rank 0 and average its gradients in every backward.

    Forward: identity. Backward: all-reduce of the gradients, in buckets, while the
    rest of the backward pass still runs; only in a step's last microbatch.

    `--config` takes the arguments of DistributedDataParallel.

    Source: Li et al., "PyTorch Distributed", VLDB 2020;
    `torch.nn.parallel.DistributedDataParallel`.
    """

    def wrap(self) -> None:
        names = list(inspect.signature(DistributedDataParallel).parameters)
        check_keys(self.options.config, names[1:], "DistributedDataParallel")
        if self.options.config.get("static_graph") and self.options.accumulate > 1:
            # Its first iteration must all-reduce, and a step's first microbatch does
            # not: torch would end in an internal assertion.
            raise ValueError(
                '--config: "static_graph" cannot be with --accumulate '
                f"{self.options.accumulate}, for all microbatches but a step's last "
                "leave the all-reduce out; leave out one of the two"
            )
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ValueError("ddp has nothing to do: no parameter requires a gradient")
        on_gpu = self.device.type == "cuda"
        settings = {
            "device_ids": [self.device.index] if on_gpu else None,
            # Gradients live in the buckets: one copy less of them in memory.
            "gradient_as_bucket_view": True,
            **self.options.config,
        }
        self.model = DistributedDataParallel(self.module, **settings)
        self.autocast()

    def begin_microbatch(self, *, is_last: bool) -> None:
        if self.model.require_backward_grad_sync != is_last:  # a module is slow to set
            self.model.require_backward_grad_sync = is_last  # what no_sync() sets

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.options.accumulate > 1 and self.model.gradient_as_bucket_view:
            # Or the next microbatch would make gradients outside of the buckets.
            set_to_none = False
        super().zero_grad(set_to_none)

    def memory(self) -> dict[str, Tensors]:
        held = super().memory()
        if not self.model.gradient_as_bucket_view:
            # The reducer's buckets are out of reach, and as large as the gradients.
            gradients = [p.grad for p in self.module.parameters()]
            held["communication_buffers"] = [
                torch.empty_like(g) for g in gradients if g is not None
            ]
        return held

    def replicas(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters())
