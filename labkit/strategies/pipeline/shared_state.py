"""What layers of several stages share: each rank would change its own of it alone."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.strategies.own_state import GENERATORS
from labkit.strategies.own_state import OwnState
from labkit.strategies.own_state import contents_of
from labkit.strategies.own_state import is_other
from labkit.strategies.relay.stages import Stages

SHARED_GENERATOR = (
    "layers of several stages draw from one generator of random numbers, and under "
    "pipeline a layer draws on the one rank that has it: the generators of the other "
    "ranks would not advance. Give each layer a generator of its own (self.generator = "
    "torch.Generator().manual_seed(number)), draw outside of the layers, or use ddp"
)
SHARED_STATE = (
    "{name} changes what layers of other stages, or the forward around the layers, use "
    "as well: an entry of a list or a dict, an attribute, or a global variable, such "
    "as a count of calls. Under pipeline a layer runs on the one rank that has it, and "
    "what the other ranks have of this would not change. Have the layer return what it "
    "has computed, give each layer a list or a count of its own, change it in the "
    "forward around the layers, or use ddp"
)


class SharedState:
    """The lists, dicts, attributes, global variables and generators of random numbers
    that layers of several stages reach, or one of them and the forward around them."""

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        layers = stages.modules
        parameters = [*model.parameters()]  # seen elsewhere, and large
        around = OwnState(model, [*parameters, *layers, *map(type, layers)])
        found = {id(each): each for each in around.objects}
        places = {key: {-1} for key in found}
        for layer, stage in zip(layers, stages.stage_of, strict=True):
            others = [each for each in layers if each is not layer]
            for each in OwnState(layer, [*parameters, *others]).objects:
                found[id(each)] = each
                places.setdefault(id(each), set()).add(stage)
        shared = [each for key, each in found.items() if len(places[key]) > 1]
        self._generators = [each for each in shared if isinstance(each, GENERATORS)]
        self._others = [each for each in shared if not isinstance(each, GENERATORS)]

    def contents_of_generators(self) -> list[Any]:
        """What they draw next: to be compared on all ranks, as one that has no values
        draws nothing."""
        return list(map(contents_of, self._generators))

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """The layer of this name runs: UnsupportedLoopError if it changes any."""
        with DisableTorchFunctionSubclass():
            before = list(map(contents_of, self._others))
        yield
        with DisableTorchFunctionSubclass():
            has_changed = any(map(is_other, before, map(contents_of, self._others)))
        if has_changed:
            raise UnsupportedLoopError(SHARED_STATE.format(name=name))
