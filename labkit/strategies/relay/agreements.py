"""What ranks along `pp` agree on: who has which tensors that a layer gets."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import is_tensor
from torch.distributed.device_mesh import DeviceMesh

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import no_dispatch
from labkit.strategies.relay.elsewhere import Elsewhere
from labkit.strategies.relay.elsewhere import Here
from labkit.strategies.relay.elsewhere import is_elsewhere
from labkit.strategies.relay.parameters import StagedParameter

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
NOT_HERE = -1
NO_TENSOR = -2
NOWHERE = (
    "{what} is computed by no rank: under pipeline a parameter is on the ranks whose "
    "stage has its layer, and here one is used outside of that layer, with what "
    "another stage computes. Use it in its layer's own forward, or make it a parameter "
    "of the outermost module, which every rank has; or use ddp"
)
NOT_RETURNED = (
    "{name} gets what a layer has computed and not returned, for example as an "
    "attribute that it keeps, in a set, or by a hook on a part of it, as the router "
    "logits of transformers; under pipeline other ranks do not see that. "
    "Have the layer return it, by itself or in a tuple, a dict or an object; or use ddp"
)
OTHER_PATTERN = (
    "{name} gets another kind of input than in an earlier batch: under pipeline the "
    "ranks agree once on what they send each other. Have forward do the same with "
    "every batch, or use ddp"
)


@dataclass(frozen=True)
class Transfer:
    """A tensor among a layer's inputs, or the model's outputs, that a rank lacks."""

    leaf: int
    source: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Known:
    """What ranks have agreed on for a call of a layer, or for the model's outputs."""

    pattern: list[int]
    """Of this rank, by leaf: a place in DTYPES, NOT_HERE or NO_TENSOR."""
    transfers: list[Transfer]
    everywhere: list[int]
    """The leaves that all ranks have."""


class Agreements:
    """Those of one model: ranks exchange what they have at the first call of a kind."""

    has_unreturned = False
    """Whether a pass has computed, between layers, with what a layer of another rank
    has not returned."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """`mesh` is that of the ranks."""
        self._mesh = mesh
        self._device = device
        self._known: dict[Any, Known] = {}

    def find(
        self, key: Any, leaves: Sequence[Any], *, owner: int | None, name: str
    ) -> Known:
        """Who has which of `leaves`. Collective where this is asked the first time, and
        where they come from other stages than before: all ranks know which."""
        key = (key, *(stage_of(leaf) if is_tensor(leaf) else "-" for leaf in leaves))
        pattern = [code_of(leaf) for leaf in leaves]
        known = self._known.get(key)
        if known is None:
            self._known[key] = known = self._exchange(key, pattern, owner, name)
        elif known.pattern != pattern:
            raise UnsupportedLoopError(OTHER_PATTERN.format(name=name))
        return known

    def _exchange(
        self, key: Any, pattern: list[int], owner: int | None, name: str
    ) -> Known:
        with no_dispatch(), DisableTorchFunctionSubclass():
            number = zlib.crc32(repr(key).encode())
            sent = torch.tensor([number, *pattern], device=self._device)
            rows = [torch.empty_like(sent) for _ in range(self._mesh.size())]
            dist.all_gather(rows, sent, group=self._mesh.get_group())
        found = [row.tolist() for row in rows]
        if any(row[0] != number for row in found):
            raise UnsupportedLoopError(
                f"ranks run different layers of the model at a time (this one {name}): "
                "each has a part of them, and pipeline needs all ranks to call the "
                "same. Make what forward decides at random or by rank the same on all"
            )
        transfers, everywhere = [], []
        _, *stages = key
        for leaf, own in enumerate(pattern):
            codes = [row[leaf + 1] for row in found]
            having = [rank for rank, code in enumerate(codes) if code >= 0]
            if own == NO_TENSOR:
                continue
            if len(having) == self._mesh.size():
                everywhere.append(leaf)
            elif not having and (stages[leaf] is None or self.has_unreturned):
                raise UnsupportedLoopError(NOT_RETURNED.format(name=name))
            elif not having:
                raise UnsupportedLoopError(NOWHERE.format(what=name))
            elif owner is not None and stages[leaf] is None:
                raise UnsupportedLoopError(NOT_RETURNED.format(name=name))
            elif owner is None or codes[owner] < 0:
                source = having[-1]
                transfers.append(Transfer(leaf, source, DTYPES[codes[source]]))
        return Known(pattern, transfers, everywhere)


def code_of(leaf: Any) -> int:
    """Whether a leaf is a tensor with values here, and of which dtype."""
    if not isinstance(leaf, torch.Tensor):
        return NO_TENSOR
    if is_elsewhere(leaf):
        return NOT_HERE
    return DTYPES.index(leaf.dtype)


def stage_of(leaf: Any) -> int | None:
    """The stage that computes a tensor, or has a parameter; None where all have it."""
    if isinstance(leaf, Here | Elsewhere | StagedParameter):
        return leaf.stage
    return None
