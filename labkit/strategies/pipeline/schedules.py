"""Runs a batch through the stages in an order of `torch.distributed.pipelining`."""

import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from labkit.records import Pass
from labkit.strategies.relay.relay import Relay

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
STAGES_A_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2}

Compute = Callable[[int], torch.Tensor]
"""The loss of the microbatch of this number, as a share of the batch's."""


class Schedule:
    """The passes of one shape of batch, in the order of `name`."""

    def __init__(
        self, name: str, relay: Relay, compute: Compute, num_microbatches: int
    ) -> None:
        """`compute` runs the model on a microbatch, as `relay` has it do."""
        self.passes: list[Pass] = []
        """Those of the last batch, on this rank."""
        self.compute = compute
        self.sent: list[int] = []
        """Bytes of a batch by rank along `pp`, once they are known."""
        self.first_pass = 0
        """Of the relay's, in the batch that is run."""
        self._num_microbatches = num_microbatches
        self._relay = relay
        stages = [
            _Stage(self, relay, stage)
            for stage in range(relay.rank, relay.stages.num_stages, relay.size)
        ]
        self._schedule = SCHEDULES[name](
            stages if STAGES_A_RANK[name] > 1 else stages[0],
            num_microbatches,
            loss_fn=lambda loss, number: loss,
            scale_grads=False,  # a microbatch's loss is its share already
        )

    def run(self) -> torch.Tensor | None:
        """All passes of a batch; its loss, on the rank of the last stage. Collective,
        along `pp`."""
        self.passes.clear()
        self.first_pass = self._relay.num_passes
        numbers = torch.arange(self._num_microbatches)
        losses: list[torch.Tensor] = []
        self._schedule.step(
            numbers, target=numbers, losses=losses, return_outputs=False, of=numbers
        )
        self._relay.num_passes = self.first_pass + self._num_microbatches
        return torch.stack([each.detach() for each in losses]).sum() if losses else None


class _Stage(PipelineStage):
    """A stage of which the passes are timed."""

    def __init__(self, schedule: Schedule, relay: Relay, stage: int) -> None:
        super().__init__(
            _StageModule(schedule, relay, stage),
            stage,
            relay.stages.num_stages,
            relay.device,
            group=relay.group,
        )
        self._passes = schedule.passes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            # Torch's own hides what the model has raised.
            raise error.__cause__ or error from None
        finally:
            self._note("forward", fwd_chunk_id, began)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._note("backward", bwd_chunk_id, began)

    def _note(self, kind: str, microbatch: int, began: float) -> None:
        ended = time.perf_counter()
        self._passes.append(Pass(kind, self.stage_index, microbatch, began, ended))


class _StageModule(nn.Module):
    """Has no parameters for torch to see: they are the model's, and stay there."""

    def __init__(self, schedule: Schedule, relay: Relay, stage: int) -> None:
        super().__init__()
        self._schedule = schedule
        self._relay = relay
        self._stage = stage
        self._is_new = True

    def forward(self, *received: torch.Tensor, of: torch.Tensor) -> Any:
        if self._is_new:
            # Torch runs it for shapes, on memory as it is: that is no place in a table.
            self._is_new = False
            with torch.no_grad():
                for each in received:
                    each.zero_()
        number = int(of)
        compute = self._schedule.compute
        inputs: Sequence[torch.Tensor] = received if self._stage else ()
        # Not counted one by one: of a new shape torch runs one more, to know it.
        self._relay.num_passes = self._schedule.first_pass + number
        return self._relay.run_stage(self._stage, inputs, lambda: compute(number))
