"""Judges the exercises in splitting a model: each layer by itself, or their stack."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from labkit.course.collectives import Traffic
from labkit.course.collectives import several_ranks
from labkit.course.exercise import Verdict
from labkit.course.exercise import of_all_ranks
from labkit.records import Pass
from labkit.theory import bubble

NAMES = ("x", "gate", "up", "down")


def gated(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """A gated perceptron, like Llama's, with weights as nn.Linear has them."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def one_all_reduce_each_way(answer: Callable[..., Any]) -> Verdict:
    """Judge `answer(x, gate, up, down)`, which is given whole weights, the same on all
    ranks, and computes `gated` of them, each rank with its part.

    The sum over the ranks of a weight's gradients has to be the gradient, and `x` has
    the whole gradient on every rank. Counted are the calls of torch.distributed.
    """
    num_ranks = several_ranks()
    dim, hidden = 8 * num_ranks, 16 * num_ranks
    shapes = [(6, dim), (hidden, dim), (hidden, dim), (dim, hidden)]
    given = [_random(shape, seed) for seed, shape in enumerate(shapes)]
    direction = _random((6, dim), len(shapes))
    whole = [each.clone().requires_grad_() for each in given]
    with FlopCounterMode(display=False) as all_operations:
        expected = gated(*whole)
        expected.backward(direction)

    mine = [each.clone().requires_grad_() for each in given]
    with FlopCounterMode(display=False) as operations:
        with Traffic() as forward:
            output = answer(*mine)
        wrong = ""
        if not isinstance(output, torch.Tensor) or type(output) is not torch.Tensor:
            wrong = f"it returns a {type(output).__name__}, not a plain tensor"
        elif output.shape != expected.shape or not _is_close(output, expected):
            wrong = "the output is not that of the whole perceptron"
        elif not output.requires_grad:
            wrong = "the output has no gradient"
        has_failed = any(of_all_ranks(bool(wrong)))
        with Traffic() as backward:
            if not has_failed:
                output.backward(direction)
    if not has_failed:
        wrong = _wrong_gradient(mine, whole)
    share = operations.get_total_flops() / all_operations.get_total_flops()
    if not wrong and share > 1.01 / num_ranks:
        wrong = f"it multiplies {share:.0%} of the whole, not 1/{num_ranks}"
    complaint, most = "", (0, 0)
    found = of_all_ranks((wrong, forward.calls.total(), backward.calls.total()))
    for rank, (told, *calls) in enumerate(found):
        complaint = complaint or (told and f"on rank {rank} {told}")
        most = max(most[0], calls[0]), max(most[1], calls[1])
    return Verdict(
        measured=f"{most[0]} collectives forward, {most[1]} backward",
        to_beat="1 and 1",
        is_beaten=most[0] <= 1 and most[1] <= 1,
        complaint=complaint,
    )


def _wrong_gradient(mine: list[torch.Tensor], whole: list[torch.Tensor]) -> str:
    """Which gradient is not the whole perceptron's; "" where all are. Collective."""
    wrong = ""
    for name, own, other in zip(NAMES, mine, whole, strict=True):
        found = torch.zeros_like(own) if own.grad is None else own.grad.clone()
        if name != "x":
            dist.all_reduce(found)
        assert other.grad is not None
        if not wrong and not _is_close(found, other.grad):
            summed = "" if name == "x" else ", summed over the ranks,"
            wrong = f"the gradient of {name}{summed} is not that of the whole"
    return wrong


def _random(shape: tuple[int, int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    return numbers.cuda() if dist.get_backend() == "nccl" else numbers


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-4))


Order = Sequence[tuple[str, int]]
"""What a rank does: ("forward", 0), ("backward", 0), ..., each a microbatch's pass."""

PIPELINES = ((2, 4), (2, 8), (4, 8), (4, 16))
"""Of how many ranks, for how many microbatches."""
FORWARD_S, BACKWARD_S = 1.0, 2.0
"""What a pass of a microbatch takes; a backward pass multiplies twice as much."""


def timetable(orders: Sequence[Order], pass_s: float = 1.0) -> list[Pass]:
    """When each pass is, on a clock of its own: rank r has stage r of the model, does
    one pass after the other, and waits where what a pass needs is not there yet. That
    it is sent takes no time. ValueError where ranks wait forever."""
    ended: dict[tuple[str, int, int], float] = {}
    now = [0.0] * len(orders)
    left = [list(order) for order in orders]
    found: list[Pass] = []
    is_stuck = False
    while any(left) and not is_stuck:
        is_stuck = True
        for rank, order in enumerate(left):
            while order and all(each in ended for each in _needs(order[0], rank, left)):
                kind, number = order.pop(0)
                needed = _needs((kind, number), rank, left)
                began = max([now[rank], *(ended[each] for each in needed)])
                took = FORWARD_S if kind == "forward" else BACKWARD_S
                now[rank] = ended[kind, rank, number] = began + took * pass_s
                found.append(Pass(kind, rank, number, began, now[rank]))
                is_stuck = False
    if is_stuck:
        waits = [f"rank {r} for {o[0][0]} {o[0][1]}" for r, o in enumerate(left) if o]
        raise ValueError(f"ranks wait forever: {', '.join(waits)}")
    return found


def _needs(
    step: tuple[str, int], rank: int, orders: Sequence[Any]
) -> list[tuple[str, int, int]]:
    """The passes, each with its rank, that this one takes something from."""
    kind, number = step
    if kind == "forward":
        return [("forward", rank - 1, number)] if rank else []
    later = [("backward", rank + 1, number)] if rank < len(orders) - 1 else []
    return [("forward", rank, number), *later]


def fill_the_bubble(answer: Callable[[int, int, int], Order]) -> Verdict:
    """Judge `answer(rank, num_ranks, num_microbatches)`, the order of a rank's passes.

    Counted are the share of time in which ranks wait, and the microbatches of which a
    rank has done the forward pass and not yet the backward pass: it keeps their
    activations. Of `PIPELINES` the first counts for which they are too many.
    """
    measured, is_beaten = "", False
    for num_ranks, num_microbatches in PIPELINES:
        where = f"with {num_ranks} ranks and {num_microbatches} microbatches"
        kinds, numbers = ("backward", "forward"), range(num_microbatches)
        each_once = [(kind, number) for kind in kinds for number in numbers]
        answers = [
            answer(rank, num_ranks, num_microbatches) for rank in range(num_ranks)
        ]
        if any(each is None for each in answers):
            return Verdict(
                complaint="order returns nothing; its last line returns passes"
            )
        orders = [
            [(str(kind), int(number)) for kind, number in passes] for passes in answers
        ]
        wrong = [
            rank for rank, order in enumerate(orders) if sorted(order) != each_once
        ]
        if wrong:
            return Verdict(
                complaint=f"{where} rank {wrong[0]} does not do each forward and each "
                f"backward pass once: {_first_wrong(orders[wrong[0]], each_once)}"
            )
        try:
            passes = timetable(orders)
        except ValueError as error:
            return Verdict(complaint=f"{where} {error}")
        busy = (FORWARD_S + BACKWARD_S) * num_microbatches
        waits = 1 - busy / max(each.ended for each in passes)
        least = bubble(num_ranks, num_microbatches)
        kept = max(_most_kept(order) for order in orders)
        measured = (
            f"{where} they wait {waits:.0%} of the time, by formula {least:.0%}, and "
            f"one keeps {kept} of the microbatches"
        )
        is_beaten = waits <= least + 1e-9 and kept <= num_ranks
        if not is_beaten:
            break
    return Verdict(
        measured=measured,
        to_beat="(p-1)/(m+p-1) of the time, and p microbatches",
        is_beaten=is_beaten,
    )


def _first_wrong(order: Order, each_once: Order) -> str:
    """What `order` lacks or has too often; one of the two holds."""
    for step in each_once:
        if (count := list(order).count(step)) != 1:
            return f"it has {step!r} {count} times"
    strange = next(step for step in order if step not in each_once)
    return f"there is no pass {strange!r}"


def _most_kept(order: Order) -> int:
    kept = [0]
    for kind, _ in order:
        kept.append(kept[-1] + (1 if kind == "forward" else -1))
    return max(kept)
