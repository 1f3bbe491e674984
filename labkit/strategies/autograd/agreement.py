"""What all ranks have to do alike, where their samples would have them differ."""

import enum
import operator
import zlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import no_dispatch
from labkit.strategies.mesh.peers import Peers

SKIPPED = (
    "ranks are at different batches, because some skipped one: by `continue`, or by a "
    "condition on the rank's own loss. Make the same decision on all ranks: call "
    "dist.all_reduce on the value that the condition tests, before it"
)
STEP_SKIPPED = (
    "some ranks have taken a step that others skipped, for example by a condition on "
    "the rank's own loss, and the parameters are no longer those of one model. Make "
    "the same decision on all ranks: call dist.all_reduce on the value that the "
    "condition tests, before it"
)
OTHER_PASSES = (
    "ranks run different numbers of forward or backward passes: {found}. Have all "
    "ranks run as many. To compute a batch in chunks, give --accumulate K, which cuts "
    "it alike on all ranks; or make their parts equal: drop_last=True, and a batch "
    "size that is a multiple of the number of ranks"
)
OTHER_SETTINGS = (
    "the optimizer's settings differ between ranks (on this one lr is {rates}), for "
    "example because a scheduler gets each rank's own loss. Average the loss over the "
    "ranks first: loss = loss.detach(); dist.all_reduce(loss, dist.ReduceOp.AVG)"
)
OTHER_LAYERS = (
    "ranks ran different layers of the model, or in another order, or used different "
    "parameters of a layer, and zero3, fsdp and hsdp gather and reduce a layer's "
    "parameters on all ranks at once. So the result is wrong, "
    "and no step is taken with it. Make what the model decides at random or by its "
    "samples the same on all ranks, or use ddp, zero1 or zero2"
)


def agree(
    used: Sequence[bool], facts: Sequence[int], peers: Peers
) -> tuple[list[bool], list[bool]]:
    """For each of `used`: whether it is so on any rank. For each of `facts`: whether it
    is the same on all of `peers`. Collective."""
    found = peers.greatest([*used, *facts, *map(operator.neg, facts)])
    some, most = found[: len(used)], found[len(used) : len(used) + len(facts)]
    least = found[len(used) + len(facts) :]
    return (
        [bool(each) for each in some],
        [one == -other for one, other in zip(most, least, strict=True)],
    )


class Event(enum.IntEnum):
    """What a loop does with a model, as ranks compare it."""

    NONE = 0
    BATCH = 1
    FORWARD = 2
    BACKWARD = 3
    STEP = 4


@dataclass
class Pass:
    """A loop's pass over its data. One in which it has not trained may be one rank's
    alone, and leaves no trace."""

    num_samples: int | None = None
    """Of this rank's part of the batch; None where all parts are equal."""
    is_new: bool = True
    """Whether the loop has not trained with the batch."""
    is_compared: bool = True
    """Whether all ranks are known to ask for the next batch."""
    has_trained: bool = False


class Course:
    """What a loop does from one batch to the next, which has to be the same on all
    ranks.

    A loop that goes by the number of its samples does more on a rank that has more of
    them. What the ranks then send each other would be mixed up, or awaited in vain. So
    where their parts are unequal, and nowhere else, they compare all that the loop does
    before they do it; in a group of its own, where nothing else is sent.
    """

    def __init__(self, team: Peers) -> None:
        self._team = team
        self._now = self._former = Pass()
        """The pass over its data, and what there was before it."""
        self.num_passes = 0
        """Backward passes since the last step."""

    def begin_pass(self) -> None:
        """The loop begins a pass over its data. Collective, where it has left another
        one at a batch that it has not trained with."""
        if self._now.is_new:
            self.ask()
        self._former, self._now = self._now, Pass()

    def end_pass(self) -> None:
        """It has ended one, or left it."""
        if not self._now.has_trained:
            self._now = self._former

    def begin_batch(self, num_samples: int, *, is_even: bool) -> None:
        """The loop gets its part of a batch."""
        if not is_even and self._team.size > 1:
            self._now.num_samples = num_samples
            self._now.is_compared = False
        elif not self._now.is_new:  # or it takes those of two loaders at once
            self._now.num_samples = None
        self._now.is_new = True

    def ask(self) -> None:
        """It asks for another. Collective."""
        is_due = self._now.has_trained and not self._now.is_compared
        if is_due and torch.is_grad_enabled():
            self._compare(Event.BATCH)
            self._now.is_compared = True

    def forward(self) -> None:
        """It runs a layer that gathers its parameters. Collective."""
        if self._now.num_samples is not None and torch.is_grad_enabled():
            self._compare(Event.FORWARD)

    def backward(self) -> None:
        """A backward pass begins. Collective."""
        self._train(Event.BACKWARD)
        self.num_passes += 1

    def step(self) -> None:
        """The optimizer is to step. Collective."""
        self._train(Event.STEP)
        self.num_passes = 0

    def end(self) -> None:
        """The run is over: what a cell does from now on may be one rank's alone."""
        self._now.num_samples, self._now.is_compared = None, True

    def _train(self, event: Event) -> None:
        if self._now.num_samples is not None:
            self._compare(event)
            self._now.is_compared = False
        self._now.is_new, self._now.has_trained = False, True

    def _compare(self, event: Event) -> None:
        """UnsupportedLoopError, on all ranks, unless all are at the same event."""
        rank, size = self._team.rank, self._team.size
        sent = np.zeros((size, 3), np.int64)
        sent[rank] = event, self.num_passes, self._now.num_samples or 0
        flat = self._team.greatest(sent.ravel().tolist(), apart=True)
        found = [tuple(flat[place : place + 3]) for place in range(0, 3 * size, 3)]
        ours = found[0][:2]
        other = next((n for n, each in enumerate(found) if each[:2] != ours), None)
        if other is not None:
            said = ", and ".join(said_of(n, *found[n]) for n in (0, other))
            raise UnsupportedLoopError(OTHER_PASSES.format(found=said))


def said_of(rank: int, event: int, num_passes: int, num_samples: int) -> str:
    """What a rank is about to do, in words."""
    does = {
        Event.BATCH: "takes the next batch",
        Event.FORWARD: "calls the model",
        Event.BACKWARD: "begins a backward pass",
        Event.STEP: "steps",
    }
    return (
        f"with {num_samples} of the samples rank {rank} {does[Event(event)]} after "
        f"{num_passes or 'no'} backward pass{'es' * (num_passes != 1)}"
    )


class Settings:
    """An optimizer's settings as a number, equal on ranks with equal settings."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: list[list[Any]] | None = None
        self._number = 0

    @property
    def number(self) -> int:
        """Of the settings as they are now."""
        found = [
            [
                value if type(value) in _PLAIN else plain(value)
                for key, value in group.items()
                if key != "params"
            ]
            for group in self._optimizer.param_groups
        ]
        if found != self._known:  # to write them out takes ten times as long
            self._known = found
            keys = [sorted(group) for group in self._optimizer.param_groups]
            self._number = zlib.crc32(repr((keys, found)).encode())
        return self._number

    @property
    def rates(self) -> str:
        """The learning rates, to be read."""
        groups = self._optimizer.param_groups
        rates = [plain(group.get("lr")) for group in groups]
        return ", ".join(
            f"{rate:.3g}" for rate in rates if isinstance(rate, int | float)
        )


_PLAIN = (bool, int, float, str, type(None))


def plain(value: Any) -> Any:
    """A setting as a number, a word or a tuple of them; None where it is neither."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    ):
        return value.item()
    return tuple(map(plain, value)) if isinstance(value, tuple | list) else None


class Route:
    """Which layers a model has run since it was asked, and in which order.

    Each of them gathers its parameters from all ranks. Ranks that run different ones
    at a time exchange the wrong parameters, which only their sizes could reveal.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before
        """Called before a layer runs."""
        self._hash = 0

    def add(self, number: int) -> None:
        """The layer of this number runs."""
        self._before()
        self._hash = (self._hash * 1_000_003 + number + 1) % (1 << 61)

    def take(self) -> int:
        """A number that identifies the route; the next route begins."""
        taken, self._hash = self._hash, 0
        return taken


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
        peers: Peers,
    ) -> None:
        self._reduce = reduce
        self._peers = peers
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
        """Parameters that the pass should reach and that have no gradient yet."""
        return [self._parameters[n] for n in self._waiting if n not in self._ready]

    def agree(self) -> None:
        """Take the order in which the first pass came on the first rank, so that
        gradients do not wait for each other. Collective, the first time."""
        if self._has_agreed:
            return
        self._has_agreed = True
        came = [*dict.fromkeys([*self._came, *self._order])]
        order = torch.tensor(came, device=self._peers.device)
        with no_dispatch():
            self._peers.broadcast(order)
        self._order = order.tolist()
