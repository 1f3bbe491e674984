"""Finds what a model's forward passes change besides computing: running means and
counters of its own."""

from collections.abc import Iterable
from typing import Any

import torch

from labkit.checks import several
from labkit.compat.torch import BatchNormBase
from labkit.compat.torch import buffers_of
from labkit.compat.torch import no_dispatch
from labkit.rank.measuring.step_profiler import parts
from labkit.records import BUFFER
from labkit.strategies.autograd.agreement import agree
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.model.fingerprints import fingerprints
from labkit.strategies.prepared import Prepared

MAX_LOOKS = 8
"""At as many steps a model is looked at before that comes half as often."""
BATCHNORM = (
    "BatchNorm takes the statistics of a rank's own part of each batch (of a "
    "microbatch, with --accumulate), so the result differs from that of one process. "
    "--sync-batchnorm takes them over the samples of all ranks"
)
NOT_COUNTED = ("_", "ds_", "applied_")
"""How names of attributes begin that are none of the user's."""


class ForwardState:
    """What one model's forward passes change: in its first steps, and in ever fewer
    later ones, as it may begin to after a warm-up.

    A buffer that they change by a rank's own samples is soon another one on each rank.
    With `--accumulate` what they count, or move by a step, moves once for each
    microbatch. BatchNorm is left out, but for a note: `--sync-batchnorm` is for that.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._num_steps = self._num_looks = 0
        self._interval = 1
        self._has_noted_repeated = False
        self._batchnorms = [
            module
            for module in prepared.module.modules()
            if isinstance(module, BatchNormBase)
        ]
        self._before: dict[str, Any] | None = None
        """At the end of the same step's microbatch before this one."""
        self._modules = [
            (f"{name}." if name else "", module)
            for name, module in prepared.module.named_modules()
            if not isinstance(module, BatchNormBase)
        ]
        self._buffers = [
            (prefix + name, module, name)
            for prefix, module in self._modules
            for name in buffers_of(module)
        ]
        none = torch.zeros(1, dtype=torch.int64, device=prepared.device)
        self._copies = dict.fromkeys(prepared.copies(), none)
        """Fingerprints of those in all steps so far."""
        names = [name for name, *_ in self._buffers]
        self.replicas = self._comparable(dict.fromkeys(names, 0))
        """By name, the buffers that should be equal on all ranks: as they were before
        the last step that was looked at. And parameters and gradients, as they were
        before all of these, where after it they are equal in any case."""

    def look(self, *, num_ranks: int, is_last: bool) -> None:
        """The loop steps, with the last microbatch of a step or another one."""
        accumulate = self._prepared.options.accumulate
        if num_ranks * accumulate == 1:
            return
        self._note_batchnorm()
        is_due = self._num_steps % self._interval == 0
        self._num_steps += is_last
        if not is_due:
            return
        buffers = self._digests()
        if accumulate > 1:
            now = buffers | self._numbers()
            if self._before is not None:
                before = self._before
                self._note_repeated([n for n in now if now[n] != before.get(n, now[n])])
            self._before = None if is_last else now
        if is_last:
            self._num_looks += 1
            if self._num_looks == MAX_LOOKS:
                self._num_looks //= 2
                self._interval *= 2
            self._add_copies()
            self.replicas = self._comparable(buffers)

    def _comparable(self, buffers: dict[str, int]) -> dict[str, torch.Tensor]:
        device = self._prepared.device
        return self._copies | {
            BUFFER + name: torch.tensor([number], device=device)
            for name, number in buffers.items()
        }

    def _add_copies(self) -> None:
        for name, tensors in self._prepared.copies().items():
            if tensors:
                with no_dispatch():
                    now = [self._copies[name], fingerprints(tensors)]
                    self._copies[name] = fingerprints([torch.cat(now)])

    def _note_batchnorm(self) -> None:
        """One in eval mode takes no statistics of a batch."""
        for module in self._batchnorms:
            if module.training and not getattr(module, "is_synchronized", False):
                self._batchnorms = []
                self._prepared.note(BATCHNORM)
                return

    def _note_repeated(self, names: list[str]) -> None:
        if names and not self._has_noted_repeated:  # which need not be on all ranks
            self._has_noted_repeated = True
            count = self._prepared.options.accumulate
            self._prepared.note(
                f"forward changes {several(names)}: with --accumulate {count} it does "
                f"so {count} times per step, where one process with whole batches does "
                "it once. Leave out --accumulate, or make that change in the loop, "
                "after optimizer.step(), under `if not optimizer.held_back:`"
            )

    def _digests(self) -> dict[str, int]:
        device = self._prepared.device
        return {
            name: digest([buffers_of(module).get(own)], device)
            for name, module, own in self._buffers
        }

    def _numbers(self) -> dict[str, str]:
        """Those among the attributes of modules, and what generators draw next."""
        return {
            prefix + name: bytes(value.get_state().tolist()).hex()
            if isinstance(value, torch.Generator)
            else str(value)
            for prefix, module in self._modules
            for name, value in vars(module).items()
            if type(value) in (int, float, torch.Generator)
            and not name.startswith(NOT_COUNTED)
        }


def digest(tensors: Iterable[torch.Tensor | None], device: torch.device) -> int:
    """A whole number that changes with any bit of these tensors, and with how many
    there are."""
    with no_dispatch():
        dense = [
            part.to(device)
            for each in tensors
            for part in parts(each)
            if not (part.is_meta or part.is_quantized)
        ]
        found = fingerprints([fingerprints(dense)]).item() if dense else 0
    return int(found) >> 2  # so that there is a negative of it


def differing(numbers: list[int], peers: Peers) -> list[bool]:
    """Which of these are not the same on all of `peers`. Collective."""
    _, are_same = agree([], numbers, peers)
    return [not is_same for is_same in are_same]
