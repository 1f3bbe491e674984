"""Gradients sent in fp16 or bf16: half the bytes."""

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from labkit.strategies.communication.hook import Future
from labkit.strategies.communication.hook import Hook

HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
ROUNDING = {
    "fp16": "11 binary digits; above 65,504 it is infinite, below 6e-8 zero",
    "bf16": "8 binary digits",
}


class HalfPrecision(Hook):
    """Cast the gradients, all-reduce them, and cast them back.

    Source: `fp16_compress_hook` and `bf16_compress_hook` of
    `torch.distributed.algorithms.ddp_comm_hooks`.
    """

    @property
    def note(self) -> str:
        return (
            f"--comm {self.method}: gradients are rounded where they are sent "
            f"({ROUNDING[self.method]}), so weights differ from those of one process"
        )

    def send(self, state: Any, bucket: dist.GradBucket) -> Future:
        group: Any = self.peers.group
        return HOOKS[self.method](group, bucket)
