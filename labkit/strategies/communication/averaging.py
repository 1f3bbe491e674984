"""Parameters averaged every few steps, in place of gradients in every step."""

import time
import zlib
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import no_dispatch
from labkit.records import Averages
from labkit.strategies.autograd.agreement import agree
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.model.fingerprints import fingerprints
from labkit.strategies.model.states import parameters_of

CHUNK_BYTES = 25 * 2**20
"""That are averaged together, as in a bucket of DDP."""


class Averaging:
    """Local SGD: every rank steps with the gradients of its own samples, and after
    every `every` steps the ranks' parameters and buffers are averaged.

    With `after`, post-local SGD: gradients are averaged in the first steps. The
    optimizer's state stays a rank's own, and is averaged where the model is to be one
    for others: in a checkpoint, and at the end of a run.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et
    al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020; torch has it as
    `torch.distributed.optim.PostLocalSGDOptimizer`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        peers: Peers,
        *,
        every: int,
        after: int,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._peers = peers
        self._every = every
        self._after = after
        self.num_steps = 0
        """Of the optimizer, in the whole of the run."""
        self.num_alone = 0
        """Steps since the ranks had one model."""
        self._has_own_state = False
        self._trained: dict[int, torch.Tensor] = {}
        """The parameters that have been trained, by id."""
        self._num_here = 0
        self._count = self._payload = self._wire = 0
        self._seconds = 0.0

    @property
    def is_local(self) -> bool:
        """Whether the next step is each rank's own."""
        return self.num_steps >= self._after

    @property
    def note(self) -> str:
        when = f"after the first {self._after} steps " if self._after else ""
        return (
            f"--average-every {self._every}: {when}each rank steps with the gradients "
            "of its own samples (--clip too is of these, and the optimizer's state is "
            f"its own), and parameters are averaged every {self._every} steps, so "
            "weights differ from those of one process. They are averaged as well "
            "before fit validates, before loader.share(...) and a checkpoint, and at "
            "the end of the run"
        )

    def resume(self, num_steps: int) -> None:
        """Go on after so many steps, with one model on all ranks."""
        self.num_steps, self.num_alone = num_steps, 0
        self._has_own_state = False

    def step(self) -> None:
        """The optimizer has taken a step. Collective where it is time to average."""
        is_local = self.is_local
        self.num_steps += 1
        if not is_local:
            return
        self._num_here += 1
        self.num_alone += 1
        self._has_own_state = True
        trained = (p for p in self._module.parameters() if p.requires_grad)
        self._trained |= {id(parameter): parameter for parameter in trained}
        if (self.num_steps - self._after) % self._every == 0:
            self.average()

    def average(self) -> None:
        """Give all ranks the mean of their parameters and buffers. Collective."""
        if not self.num_alone:
            return
        began, size = time.perf_counter(), self._peers.size
        # It is no part of the one step that is measured: see `sent`.
        with no_dispatch(), torch.no_grad():
            self._check_agreement()
            tensors = [*self._trained.values(), *self._changed()]
            for chunk in chunks([*tensors, *self._module.buffers()]):
                num_bytes = self._average(chunk)
                self._count += 1
                self._payload += num_bytes
                self._wire += 2 * (num_bytes * (size - 1) // size)
        self.num_alone = 0
        self._seconds += time.perf_counter() - began

    def average_state(self) -> bool:
        """Give all ranks the mean of their optimizers' states; whether these are alike
        and it could. Collective."""
        if not self._has_own_state:
            return True
        tensors = [
            (f"{number}.{key}.{tuple(value.shape)}", value)
            for number, parameter in enumerate(parameters_of(self._optimizer))
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor)
        ]
        layout = zlib.crc32(" ".join(name for name, _ in tensors).encode())
        with no_dispatch(), torch.no_grad():
            if not self._peers.agree_on(layout):
                return False
            for chunk in chunks(value for _, value in tensors):
                self._average(chunk)
        self._has_own_state = False
        return True

    def _check_agreement(self) -> None:
        if not self._peers.agree_on(self.num_steps):
            raise UnsupportedLoopError(
                "the ranks have not taken the same number of optimizer steps, so with "
                "--average-every they would average models of different steps. Take "
                "every step on all ranks; where a run was stopped within a step, build "
                "model and optimizer again and prepare them"
            )

    def _changed(self) -> list[torch.Tensor]:
        """Parameters that are not trained and no longer the same on all ranks: the loop
        changes them, as an average of the others. Collective."""
        others = [p for p in self._module.parameters() if id(p) not in self._trained]
        if not others:
            return []
        _, are_same = agree((), fingerprints(others).tolist(), self._peers)
        return [p for p, is_same in zip(others, are_same, strict=True) if not is_same]

    def _average(self, tensors: list[torch.Tensor]) -> int:
        """Those of one dtype, together; of whole numbers the greatest is taken. The
        bytes that are reduced."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        is_mean = flat.is_floating_point() or flat.is_complex()
        flat = flat.to(self._peers.device, None if is_mean else torch.int64)
        operation = dist.ReduceOp.SUM if is_mean else dist.ReduceOp.MAX
        self._peers.all_reduce(flat, operation)
        if is_mean:
            flat /= self._peers.size
        for tensor, part in zip(
            tensors, flat.split([t.numel() for t in tensors]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))
        return flat.nbytes

    def sent(self) -> Averages:
        """What this rank has sent of its parameters, in the run so far."""
        return Averages(
            self._num_here, self._count, self._payload, self._wire, self._seconds
        )


def chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In order, of one dtype each, and of `CHUNK_BYTES` or one tensor at most."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        chunk: list[torch.Tensor] = []
        for tensor in same:
            if chunk and sum(t.nbytes for t in chunk) + tensor.nbytes > CHUNK_BYTES:
                yield chunk
                chunk = []
            chunk.append(tensor)
        if chunk:
            yield chunk
