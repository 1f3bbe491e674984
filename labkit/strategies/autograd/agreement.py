"""What all ranks have to do alike, where their samples would have them differ."""

import enum
import zlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import no_dispatch
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.mesh.peers import Pending
from labkit.strategies.mesh.peers import in_rows

SKIPPED = (
    "ranks are at different batches, because some skipped one: by `continue`, or by a "
    "condition on the rank's own loss. Make the same decision on all ranks: call "
    "dist.all_reduce on the value that the condition tests, before it. Or one rank "
    "alone took batches of the loader: do so on all ranks, or look at loader.dataset"
)
STEP_SKIPPED = (
    "some ranks have taken a step that others skipped, for example by a condition on "
    "the rank's own loss, and the parameters are no longer those of one model. Make "
    "the same decision on all ranks: call dist.all_reduce on the value that the "
    "condition tests, before it"
)
OTHER_PASSES = (
    "ranks run different numbers of forward or backward passes: {found}. Make every "
    "rank run the same number. To compute a batch in chunks, give --accumulate K, "
    "which cuts it alike on all ranks; or make their parts equal: drop_last=True, and "
    "a batch size that is a multiple of the number of ranks"
)
OTHER_PASSES_BY_VALUES = (
    "ranks run different numbers of forward or backward passes: {found}. Make every "
    "rank run the same number. Where it depends on the samples, as on the longest of a "
    "batch, give all batches one length, or take the greatest number of all ranks: "
    "dist.all_reduce(number, dist.ReduceOp.MAX). Or use ddp, zero1 or zero2, under "
    "which a rank may run more forward passes than another"
)
OTHER_COPIES = (
    "some ranks have copied the model, by copy.deepcopy, and others have not, for "
    "example by a condition on the rank's own loss. A copy of a model in parts is in "
    "parts as well, so that these would be of different steps. Make the same "
    "decision on all ranks: call dist.all_reduce on the value that the condition "
    "tests, before it"
)
OTHER_PENALTY = (
    "some ranks compute a number of the model's parameters, such as a penalty that is "
    "added to the loss, and others do not, for example by a condition on the rank's "
    "own loss. Under fsdp and hsdp ranks have the parameters in parts, and compute it "
    "together. Make the same decision on all ranks: call dist.all_reduce on the value "
    "that the condition tests, before it"
)
NUM_LOOKS = 3
"""Steps in which what layers that gather their parameters do is compared anyhow."""
NUM_ALIKE = 10
"""So many, where the first were unlike: in that of a GAN no step of the generator has
called the critic yet."""
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
    return begin_agree(used, facts, peers).wait()


def begin_agree(
    used: Sequence[bool], facts: Sequence[int], peers: Peers
) -> Pending[tuple[list[bool], list[bool]]]:
    """As `agree`, which may be waited for later. Collective."""

    def read(found: list[bytes]) -> tuple[list[bool], list[bool]]:
        if len({*found}) == 1:  # mostly; numpy takes ten times as long to see it
            return list(used), [True] * len(facts)
        rows = in_rows(found, np.int64)
        some = rows[:, : len(used)].any(0)
        are_same = (rows[:, len(used) :] == rows[0, len(used) :]).all(0)
        return some.tolist(), are_same.tolist()

    return peers.begin_exchange(array("q", [*used, *facts]).tobytes()).then(read)


class Event(enum.IntEnum):
    """What a loop does with a model, as ranks compare it."""

    BATCH = 1
    FORWARD = 2
    BACKWARD = 3
    STEP = 4
    PENALTY = 5


@dataclass
class Pass:
    """A loop's pass over its data."""

    num_batches: int = 0
    """That the loop has been given so far, in this pass and those before."""
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
    where their parts are unequal, they compare all that the loop does before they do
    it; in a group of its own, where nothing else is sent.

    Where layers gather their parameters, as many calls of the model are to be made on
    each rank. A loop may make one for each token of its longest sample: the first steps
    are compared whatever the parts, and where these make different numbers of calls,
    all are.
    """

    def __init__(self, team: Peers) -> None:
        self._team = team
        self._now = self._trained = Pass()
        """The pass over its data, and the last one that it has trained in."""
        self._num_open = 0
        self.num_passes = 0
        """Backward passes since the last step."""
        self.num_copies = 0
        """Of a model in parts."""
        self._num_calls = 0
        """Of the model, that are under way, one within the other."""
        self._is_in_backward = self._is_compared = False
        """Whether the call of the model that is under way is."""
        self._gathers = False
        """Whether layers gather their parameters."""
        self._looks = True
        """Whether equal parts are compared, too: the same on all ranks, for what it
        goes by has been."""
        self._num_compared = 0
        """Calls of the model since the last step."""
        self._before = 0
        """The same of the step before."""
        self._num_steps = self._num_alike = 0
        """Steps so far, and the last of them with as many calls each."""

    @property
    def num_batches(self) -> int:
        """That the loop has been given."""
        return self._now.num_batches

    def begin_looking(self) -> None:
        """The model's layers gather their parameters. Collective."""
        self._gathers = True
        # Makes the links now, and not within the first step.
        self._team.greatest([0], apart=True)

    def begin_pass(self) -> None:
        """The loop begins a pass over its data."""
        before, self._now = self._now, Pass(self._now.num_batches)
        if self._num_open:  # it takes batches of two loaders at once
            self._now.num_samples = before.num_samples
        self._num_open += 1

    def end_pass(self) -> None:
        """It has ended one, or left it."""
        self._num_open -= 1

    def begin_batch(self, num_samples: int, *, is_even: bool) -> None:
        """The loop gets its part of a batch."""
        self._now.num_batches += 1
        if not is_even and self._team.size > 1:
            self._now.num_samples = num_samples
            self._now.is_compared = False
        elif not self._now.is_new:  # or it takes those of two loaders at once
            self._now.num_samples = None
        self._now.is_new = True

    def ask(self) -> None:
        """It asks for another. Collective."""
        if torch.is_grad_enabled():
            self._settle(self._now)

    def begin_call(self) -> None:
        """It calls a model whose layers gather their parameters."""
        self._num_calls += 1
        self._is_compared = False

    def end_call(self) -> bool:
        """The call has ended, or failed; whether none is under way any more. (One that
        fails before it has begun ends, too, and one that is interrupted does not.)"""
        self._num_calls = max(0, self._num_calls - 1)
        return not self._num_calls

    def forward(self) -> None:
        """It runs a layer that gathers its parameters. Collective for the first one of
        a call of the model, and for one that is called by itself: in a backward pass
        layers are recomputed."""
        is_known = self._num_calls and self._is_compared
        if is_known or self._is_in_backward or not torch.is_grad_enabled():
            return
        self._is_compared = True
        self._num_compared += 1
        self._settle_former()
        if self._compares(self._now):
            self._compare(Event.FORWARD, self._now)

    def penalty(self) -> None:
        """It adds up parameters that are here in parts. Collective."""
        self._settle_former()
        if self._compares(self._now):
            self._compare(Event.PENALTY, self._now)

    def backward(self) -> None:
        """A backward pass begins. Collective."""
        self._train(Event.BACKWARD)
        self._num_calls = 0
        self.num_passes += 1
        self._is_in_backward = True

    def end_backward(self) -> None:
        self._is_in_backward = False

    def step(self) -> None:
        """The optimizer is to step. Collective."""
        self._train(Event.STEP)
        self.num_passes = 0
        if self._gathers and self._looks:
            is_alike = self._num_compared == self._before
            self._num_alike = self._num_alike + 1 if is_alike else 1
            self._num_steps, self._before = self._num_steps + 1, self._num_compared
            are_all = self._num_alike == self._num_steps
            self._looks = self._num_alike < (NUM_LOOKS if are_all else NUM_ALIKE)
        self._num_compared = 0

    def copy(self) -> None:
        """It copies a model that is here in parts, or a copy of it."""
        self.num_copies += 1

    def finish(self) -> None:
        """The loop has ended well. Collective."""
        self._settle(self._trained)

    def end(self) -> None:
        """The run is over: what a cell does from now on may be one rank's alone."""
        self._now = self._trained = Pass(self._now.num_batches)
        self._looks = False

    def _compares(self, which: Pass) -> bool:
        """Whether what the loop does in that pass is compared."""
        looks = self._gathers and self._looks and self._team.size > 1
        return looks or which.num_samples is not None

    def _train(self, event: Event) -> None:
        self._settle_former()
        if self._compares(self._now):
            self._compare(event, self._now)
            self._now.is_compared = False
        self._now.is_new = False
        if not self._now.has_trained:
            self._now.has_trained = True
            self._trained = self._now

    def _settle_former(self) -> None:
        """The loop trains in another pass. A rank that only looks at one does not."""
        if self._trained is not self._now:
            self._settle(self._trained)

    def _settle(self, which: Pass) -> None:
        """The loop is done with a batch of that pass."""
        if which.has_trained and not which.is_compared:
            self._compare(Event.BATCH, which)
            which.is_compared = True

    def _compare(self, event: Event, which: Pass) -> None:
        """UnsupportedLoopError, on all ranks, unless all are at the same event."""
        # The samples with one more, or 0 where all parts are equal.
        samples = 0 if which.num_samples is None else which.num_samples + 1
        sent = np.array([event, self.num_passes, which.num_batches, samples], np.int64)
        gathered = self._team.begin_gather(sent, apart=True).wait()
        found = [tuple(each) for each in gathered.tolist()]
        ours = found[0][:3]
        other = next((n for n, each in enumerate(found) if each[:3] != ours), None)
        if other is None:
            return
        if found[other][2] != found[0][2]:
            raise UnsupportedLoopError(SKIPPED)
        is_even = not any(each[3] for each in found)
        events = {each[0] for each in found}
        if Event.PENALTY in events:
            raise UnsupportedLoopError(OTHER_PENALTY)
        if is_even and events == {Event.STEP, Event.BATCH}:
            raise UnsupportedLoopError(STEP_SKIPPED)
        said = ", and ".join(said_of(n, *found[n]) for n in (0, other))
        why = OTHER_PASSES_BY_VALUES if is_even else OTHER_PASSES
        raise UnsupportedLoopError(why.format(found=said))


def said_of(
    rank: int, event: int, num_passes: int, num_batches: int, num_and_one: int
) -> str:
    """What a rank is about to do, in words."""
    num_samples = num_and_one - 1
    has = f", which has {num_samples} sample{'s' * (num_samples != 1)},"
    does = {
        Event.BATCH: "takes the next batch",
        Event.FORWARD: "calls the model",
        Event.BACKWARD: "begins a backward pass",
        Event.STEP: "steps",
    }
    return (
        f"rank {rank}{has if num_and_one else ''} "
        f"{does[Event(event)]} after {num_passes or 'no'} backward "
        f"pass{'es' * (num_passes != 1)}"
    )


class Settings:
    """An optimizer's settings as a number, equal on ranks with equal settings."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: list[Any] | None = None
        self._number = 0

    @property
    def number(self) -> int:
        """Of the settings as they are now."""
        found: list[Any] = []
        for group in self._optimizer.param_groups:
            for key, value in group.items():
                if key != "params":
                    found.append(value if type(value) in _PLAIN else plain(value))
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


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Those of each of its groups that are numbers, words, or tuples of them."""
    return [
        {name: plain(each) for name, each in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


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
        num_held: int = 0,
    ) -> None:
        """`num_held` elements of gradients come before a pass waits for what the ranks
        agree on: as many as are sent at once."""
        self._reduce = reduce
        self._peers = peers
        self._num_held = num_held
        self._parameters = parameters
        self._number = {id(each): number for number, each in enumerate(parameters)}
        self._order = [*reversed(range(len(parameters)))]
        """As a backward pass is likely to come by them."""
        self._has_agreed = False
        self._came: list[int] = []
        self._waiting: list[int] = []
        """Of this pass, the next one to reduce at the end."""
        self._ready: dict[int, tuple[Any, ...]] = {}
        self._num_came = 0
        """Elements of the gradients of this pass that are there."""
        self._used: Pending[list[nn.Parameter]] | None = None
        """What this pass reaches, until the ranks are known to agree on it."""

    def begin(self, used: Pending[list[nn.Parameter]]) -> None:
        """A backward pass begins that reaches `used`, equal on all ranks."""
        self._used = used
        self._waiting.clear()
        self._ready.clear()
        self._came.clear()
        self._num_came = 0

    def add(self, parameter: nn.Parameter, *rest: Any) -> None:
        """The gradient of `parameter` is there; `rest` is for `reduce`."""
        number = self._number[id(parameter)]
        self._came.append(number)
        self._ready[number] = parameter, *rest
        if self._used is not None and self._num_held:
            # Until there is enough to send, the pass goes on. By what has come, and not
            # by whether the ranks agree already, which one sees earlier than another:
            # what else the pass sends, of a layer or of a second model, would meet the
            # gradients.
            self._num_came += parameter.numel()
            if self._num_came < self._num_held:
                return
        self._reduce_ready()

    def _reduce_ready(self) -> None:
        """Those whose turn it is."""
        if self._used is not None:
            used, self._used = self._used.wait(), None
            numbers = {self._number[id(parameter)] for parameter in used}
            self._waiting = [each for each in reversed(self._order) if each in numbers]
        while self._waiting and self._waiting[-1] in self._ready:
            self._reduce(*self._ready.pop(self._waiting.pop()))

    def late(self) -> list[nn.Parameter]:
        """Parameters that the pass should reach and that have no gradient yet."""
        self._reduce_ready()
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
