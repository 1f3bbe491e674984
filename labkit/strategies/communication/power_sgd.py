"""Gradients of matrices sent as two thin factors of them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from labkit.checks import UnsupportedLoopError
from labkit.strategies.communication.hook import Future
from labkit.strategies.communication.hook import Hook
from labkit.strategies.communication.residuals import Residuals
from labkit.strategies.communication.residuals import ids_of
from labkit.strategies.mesh.peers import Peers

DEFAULTS: dict[str, Any] = {
    # Torch's own is 1000, and a shorter run would compress nothing.
    "start_powerSGD_iter": 2,
    # Without it a gradient that is zero becomes NaN.
    "orthogonalization_epsilon": 1e-8,
}
TINY = 1e-6


class PowerSGD(Hook):
    """Send of the gradient M of a matrix, n x m, factors P and Q of a low rank.

    P = MQ is all-reduced and made orthogonal, then Q = M'P is all-reduced: PQ' is the
    mean gradient, as far as this rank can hold it. Vectors are sent whole.

    The hook is torch's. What it keeps by the number of a bucket is given to it again
    where buckets have changed: the residuals as they belong to the parameters, P and Q
    as random ones.

    `--config` takes the arguments of `PowerSGDState`.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019;
    `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`.
    """

    takes = tuple(inspect.signature(PowerSGDState).parameters)[1:]

    def __init__(self, method: str, peers: Peers, config: Mapping[str, Any]) -> None:
        super().__init__(method, peers, config)
        given = {name: config[name] for name in self.takes if name in config}
        try:
            self._state = PowerSGDState(None, **{**DEFAULTS, **given})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"--config: PowerSGDState refuses it: {error}") from None
        if self._state.use_error_feedback:
            self.residuals = Residuals()
        self._layout: dict[int, tuple[int, ...]] = {}
        """The ids of the parameters of each bucket, by its number."""
        self._noise: dict[int, torch.Tensor] = {}
        self.settings = {
            "rank": float(self._state.matrix_approximation_rank),
            "min_compression_rate": float(self._state.min_compression_rate),
        }

    @property
    def note(self) -> str:
        rank, start = (
            self._state.matrix_approximation_rank,
            self._state.start_powerSGD_iter,
        )
        return (
            f"--comm powersgd: gradients of matrices are sent as factors of rank "
            f"{rank} from backward pass {start + 1} on, and whole before, so weights "
            "differ from those of one process. In a notebook cell options = "
            '{"matrix_approximation_rank": 4, "start_powerSGD_iter": 10}, and --config '
            "options, send more"
        )

    def check(self, model: nn.Module) -> None:
        super().check(model)
        for name, parameter in model.named_parameters():
            if not parameter.dim():
                raise UnsupportedLoopError(
                    f"{name} is a parameter without a dimension, which --comm powersgd "
                    "does not take: give it one, for example "
                    "torch.nn.Parameter(torch.tensor([1.0])), or use --comm topk or "
                    "bf16"
                )
            if not parameter.is_contiguous():
                raise UnsupportedLoopError(
                    f"{name} is not contiguous, for example after "
                    ".to(memory_format=torch.channels_last), and --comm powersgd takes "
                    "its gradient as a matrix; keep the model contiguous, or use "
                    "--comm topk or bf16"
                )

    def begin(self, *, is_new: bool) -> None:
        if is_new:
            # After a failure, ranks may have come to different ends.
            [self._state.iter] = self.peers.greatest([self._state.iter])
            self._forget_factors()

    def _forget_factors(self) -> None:
        for each in (self._state.p_memory_dict, self._state.q_memory_dict):
            each.clear()
        self._layout.clear()
        self._noise.clear()

    def send(self, state: Any, bucket: dist.GradBucket) -> Future:
        ours, number, ids = self._state, bucket.index(), ids_of(bucket)
        ours.process_group = self.peers.own_group  # which a restart replaces
        if self._layout.get(number) != ids:
            self._layout[number] = ids
            ours.p_memory_dict.pop(number, None)
            ours.q_memory_dict.pop(number, None)
            self._noise.pop(number, None)
        is_compressed = ours.iter >= ours.start_powerSGD_iter
        ours.error_dict.pop(number, None)
        if self.residuals and (before := self.residuals.of(bucket)) is not None:
            ours.error_dict[number] = before
        self._wake_zeros(number)

        def keep(future: Any) -> torch.Tensor:
            if self.residuals and is_compressed:
                self.residuals.put(ids, ours.error_dict.pop(number))
            averaged: torch.Tensor = future.value()
            return averaged

        sent: Future = powerSGD_hook(ours, bucket).then(keep)
        if self.peers.device.type == "cpu":
            # It starts collectives in threads of gloo, where those of two buckets come
            # in another order on each rank.
            sent.wait()
        return sent

    def _wake_zeros(self, number: int) -> None:
        """Of a gradient that was zero once, Q is zero, and so would be all that follow
        from it: torch's hook would send nothing of that matrix ever after."""
        factors = self._state.q_memory_dict.get(number)
        if factors is None:
            return
        if number not in self._noise:
            random = torch.Generator().manual_seed(number)  # the same on all ranks
            noise = TINY * torch.randn(len(factors), generator=random)
            self._noise[number] = noise.to(factors)
        is_dead = (factors == 0) | ~factors.isfinite()
        torch.where(is_dead, self._noise[number], factors, out=factors)

    def steps_to_measure(self) -> list[int]:
        return [max(1, self._state.start_powerSGD_iter + 1 - self._state.iter)]

    def tensors(self) -> list[torch.Tensor]:
        factors = [self._state.p_memory_dict, self._state.q_memory_dict]
        return super().tensors() + [t for each in factors for t in each.values()]

    def state(self) -> dict[str, int]:
        return {"iter": self._state.iter}

    def set_state(self, state: Mapping[str, int]) -> None:
        self._state.iter = state.get("iter", 0)
        self._forget_factors()
