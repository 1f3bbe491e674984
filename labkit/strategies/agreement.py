"""What all ranks have to do alike, where their samples would have them differ."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._mode_utils import no_dispatch


def greatest(values: torch.Tensor) -> list[Any]:
    """The greatest of all ranks, element by element. Collective, and no part of what
    is measured of a step: it is no part of the strategy."""
    with no_dispatch():
        dist.all_reduce(values, dist.ReduceOp.MAX)
        found: list[Any] = values.tolist()
    return found


def used_anywhere(
    parameters: Sequence[nn.Parameter], used: set[int], device: torch.device
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Of `parameters`, equal on all ranks: those in use on any rank, and those of them
    in use on some ranks alone. `used` holds ids of this rank's. Collective."""
    ours = torch.tensor([id(parameter) in used for parameter in parameters])
    some, not_all = greatest(torch.stack([ours, ~ours]).to(device, torch.uint8))
    return (
        [p for p, is_used in zip(parameters, some, strict=True) if is_used],
        [p for p, *on in zip(parameters, some, not_all, strict=True) if all(on)],
    )


class InOrder:
    """Reduces the gradients of parameters in one order on all ranks.

    DeepSpeed reduces them as they come. Autograd gives them in an order of the graph,
    which may be another on each rank, as of an LSTM over packed sequences: ranks would
    then add up gradients of different parameters.
    """

    def __init__(
        self,
        reduce: Callable[..., None],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self._reduce = reduce
        self._device = device
        self._parameters = parameters
        self._number = {id(each): number for number, each in enumerate(parameters)}
        self._order = [*reversed(range(len(parameters)))]
        """As a backward pass is likely to come by them."""
        self._has_agreed = False
        self._came: list[int] = []
        self._waiting: list[int] = []
        """Of this pass, the next one to reduce at the end."""
        self._ready: dict[int, tuple[Any, ...]] = {}

    def begin(self, used: Iterable[nn.Parameter]) -> None:
        """A backward pass begins that reaches `used`, equal on all ranks."""
        numbers = {self._number[id(parameter)] for parameter in used}
        self._waiting = [each for each in reversed(self._order) if each in numbers]
        self._ready.clear()
        self._came.clear()

    def add(self, parameter: nn.Parameter, *rest: Any) -> None:
        """The gradient of `parameter` is there; `rest` is for `reduce`."""
        number = self._number[id(parameter)]
        self._came.append(number)
        self._ready[number] = parameter, *rest
        while self._waiting and self._waiting[-1] in self._ready:
            self._reduce(*self._ready.pop(self._waiting.pop()))

    def late(self) -> list[nn.Parameter]:
        """Those that the pass was to reach and whose gradients have not come."""
        return [self._parameters[n] for n in self._waiting if n not in self._ready]

    def agree(self) -> None:
        """Take the order in which the first pass came on rank 0, so that gradients do
        not wait for each other. Collective, the first time."""
        if self._has_agreed:
            return
        self._has_agreed = True
        came = [*dict.fromkeys([*self._came, *self._order])]
        order = torch.tensor(came, device=self._device)
        with no_dispatch():
            dist.broadcast(order, src=0)
        self._order = order.tolist()
