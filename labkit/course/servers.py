"""What the notebook about parameter servers measures: workers of unequal speed, on a
clock of their own."""

import heapq
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.course.exercise import Verdict
from labkit.data import digits
from labkit.models import mlp

MayGo = Callable[[int, Sequence[int]], bool]
"""Whether a worker may begin its next step: of how many it has taken, and how many each
of the others has."""

SPEEDS = (1.0, 1.0, 1.0, 4.0)
"""What a worker's step takes; that of the last is four times as long."""
SHARE = 16
"""Samples of a worker's step."""
RATE = 0.5
LOSS = 0.5
"""Which is to be reached, on the samples that were trained with."""
MOST_STEPS = 200
MOST_AHEAD = 30


@dataclass(frozen=True)
class Raced:
    """How a training on such a clock went."""

    seconds: float
    """Of that clock, until the loss was reached; infinite where it never was."""
    ahead: int
    """How many steps a worker was ahead of the slowest at most, when it began one."""
    staleness: float
    """The other workers' steps between a pull and the step with its gradient, on
    average."""


def race(may_go: MayGo, speeds: Sequence[float] = SPEEDS) -> Raced:
    """Train a perceptron on the digits with a server and workers of these speeds.

    Each push is a step of its own, with the learning rate divided by the number of
    workers, so that as many pushes move as far as one averaged step. What it takes is
    counted, not measured: it is the same on every machine.
    """
    torch.manual_seed(0)
    model = mlp()
    server = list(model.parameters())
    images, labels = digits().tensors
    taken = [0] * len(speeds)
    waiting: list[int] = []
    under_way: list[tuple[float, int]] = []
    pulled: dict[int, tuple[list[torch.Tensor], int]] = {}
    num_pushes = stale = ahead = 0
    now = 0.0

    def others(worker: int) -> list[int]:
        return taken[:worker] + taken[worker + 1 :]

    def begin(worker: int) -> None:
        nonlocal ahead
        ahead = max(ahead, taken[worker] - min(taken))
        pulled[worker] = [p.detach().clone() for p in server], num_pushes
        heapq.heappush(under_way, (now + speeds[worker], worker))

    for worker in range(len(speeds)):
        begin(worker)
    while under_way and max(taken) < MOST_STEPS:
        now, worker = heapq.heappop(under_way)
        weights, version = pulled.pop(worker)
        first = (len(speeds) * taken[worker] + worker) * SHARE % (len(images) - SHARE)
        batch = slice(first, first + SHARE)
        own = [w.requires_grad_() for w in weights]
        names = [name for name, _ in model.named_parameters()]
        output = torch.func.functional_call(
            model, dict(zip(names, own, strict=True)), images[batch]
        )
        loss = F.cross_entropy(output, labels[batch])
        gradients = torch.autograd.grad(loss, own)
        with torch.no_grad():
            for parameter, gradient in zip(server, gradients, strict=True):
                parameter.sub_(RATE / len(speeds) * gradient)
        stale += num_pushes - version
        num_pushes += 1
        taken[worker] += 1
        waiting.append(worker)
        # All that end at this moment are in before anyone begins.
        if under_way and under_way[0][0] == now:
            continue
        if _loss(model, images, labels) <= LOSS:
            return Raced(now, ahead, stale / num_pushes)
        for each in [w for w in waiting if may_go(taken[w], others(w))]:
            waiting.remove(each)
            begin(each)
    return Raced(float("inf"), ahead, stale / max(1, num_pushes))


def _loss(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(images[:640]), labels[:640]))


def in_step(own: int, others: Sequence[int]) -> bool:
    """Workers take each step together, as an all-reduce has it."""
    return own <= min(others)


def sooner_than_all_reduce(may_go: MayGo) -> Verdict:
    """Judge a rule for workers: one of four is slow, and the loss is to be reached
    soon, with nobody too far ahead."""
    together, found = race(in_step), race(may_go)
    share = found.seconds / together.seconds
    return Verdict(
        measured=f"{share:.0%} of all-reduce's time, and at most {found.ahead} steps "
        "ahead",
        to_beat=f"50% of the time, at most {MOST_AHEAD} steps ahead",
        is_beaten=share <= 0.5 and found.ahead <= MOST_AHEAD,
        complaint=""
        if share < float("inf")
        else f"the loss never falls to {LOSS}: some workers wait forever",
    )
