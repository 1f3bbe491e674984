"""What every way of sending gradients in fewer bytes has: a communication hook of DDP,
and the state that goes with it."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.strategies.communication.residuals import Residuals
from labkit.strategies.mesh.peers import Peers

Future = torch.futures.Future[torch.Tensor]


class Hook:
    """Sends the gradients of a bucket in fewer bytes: `send` is given to
    `DistributedDataParallel.register_comm_hook`.

    It returns the mean over the ranks of what each has sent. With `residuals`, what a
    rank has not sent it adds to its next gradients (error feedback).
    """

    takes: tuple[str, ...] = ()
    """The settings that `--config` may have for it."""

    def __init__(self, method: str, peers: Peers, config: Mapping[str, Any]) -> None:
        self.method = method
        self.peers = peers
        self.residuals: Residuals | None = None
        self.settings: dict[str, float] = {}
        """What its formula of bytes needs."""

    @property
    def note(self) -> str:
        """A sentence on how the result differs from that of one process."""
        raise NotImplementedError

    def check(self, model: nn.Module) -> None:
        """UnsupportedLoopError for gradients that it could not send."""
        for name, module in model.named_modules():
            if getattr(module, "sparse", False) and isinstance(
                module, nn.Embedding | nn.EmbeddingBag
            ):
                raise UnsupportedLoopError(
                    f"{name or 'the model'} is an embedding with sparse=True, whose "
                    f"gradients --comm {self.method} cannot send: make it without "
                    "sparse=True, or leave out --comm"
                )
        for name, parameter in model.named_parameters():
            if parameter.is_complex():
                raise UnsupportedLoopError(
                    f"{name} is a complex parameter, whose gradient --comm "
                    f"{self.method} cannot send; leave out --comm"
                )

    def begin(self, *, is_new: bool) -> None:
        """A backward pass begins; `is_new` with a reducer that has had none. Then it is
        collective."""

    def send(self, state: Any, bucket: dist.GradBucket) -> Future:
        """Average the gradients of `bucket` over the ranks, in place. Collective."""
        raise NotImplementedError

    def end(self, *, has_failed: bool) -> None:
        """It has ended: keep what was not sent, unless it has failed."""
        if self.residuals is not None and not has_failed:
            self.residuals.end()

    def steps_to_measure(self) -> list[int]:
        """Backward passes from here, counted from 1, that send another number of bytes
        than the one before."""
        return []

    def tensors(self) -> list[torch.Tensor]:
        """What it holds beside the gradients."""
        return [] if self.residuals is None else self.residuals.tensors()

    def state(self) -> dict[str, int]:
        """What a run that resumes goes on with, besides the residuals."""
        return {}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on from what `state` gave."""
