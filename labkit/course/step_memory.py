"""Judges exercises on memory, by what tensors hold and who owns which."""

from collections.abc import Callable
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.course.exercise import Verdict
from labkit.course.exercise import of_all_ranks
from labkit.estimate.trace import Watch
from labkit.models import GPT
from labkit.models import next_token_loss

BATCH, SEQUENCE = 8, 64


def peak_bytes(step: Callable[[], Any], older: Sequence[torch.Tensor]) -> int:
    """The most that `step()` holds in tensors beside those `older` than it.

    On a GPU that is what its allocator counts, scratch space of libraries included.
    """
    if older[0].is_cuda:
        device = older[0].device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    totals = [0]
    with Watch(older, lambda stage: totals.append(watch.totals[stage])) as watch:
        step()
    return max(totals)


def half_the_peak(answer: Callable[[nn.Module, Any, Any], Any]) -> Verdict:
    """Judge `answer(model, x, y)`: it leaves in `.grad` the gradient of
    `next_token_loss(model(x), y)`, and changes nothing else.

    Counted is what it holds at its most, activations and gradients, against one
    backward pass of the whole batch.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(dist.get_rank())
        model = GPT(context=SEQUENCE).to(device)
        tokens = torch.randint(256, (BATCH, SEQUENCE + 1))
    x, y = (each.contiguous().to(device) for each in (tokens[:, :-1], tokens[:, 1:]))
    parameters = list(model.parameters())
    weights = [each.detach().clone() for each in parameters]
    older = [*parameters, x, y]

    def naive(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        next_token_loss(model(x), y).backward()

    naive(model, x, y)  # what libraries allocate once is there from here on
    model.zero_grad()
    to_halve = peak_bytes(partial(naive, model, x, y), older)
    expected = [parameter.grad for parameter in parameters]
    model.zero_grad()
    peak = peak_bytes(partial(answer, model, x, y), [*older, *_given(expected)])
    complaint = _compare(parameters, expected, weights)
    found = of_all_ranks((complaint, peak / to_halve))
    told = next(
        (f"on rank {r} {each[0]}" for r, each in enumerate(found) if each[0]), ""
    )
    share = max(each[1] for each in found)
    return Verdict(
        measured=f"the same gradient at {share:.0%} of the peak",
        to_beat="less than 50%",
        is_beaten=share < 0.5,
        complaint=told,
    )


def partition_by_owner(answer: Callable[[list[int], int], Sequence[int]]) -> Verdict:
    """Judge `answer(sizes, world_size)`: the owner of each tensor, given their sizes.

    One step of Adam follows, in which the owner updates a tensor and sends it to all.
    Counted is the share of the elements that the largest owner has.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, alone = GPT().to(device), GPT().to(device)
        tokens = torch.randint(256, (world_size, 17)).to(device)
    alone.load_state_dict(model.state_dict())
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    owners = [int(owner) for owner in answer(list(sizes), world_size)]
    if complaint := _wrong_owners(owners, len(sizes), world_size):
        return Verdict(complaint=complaint)
    shares = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == each)
        for each in range(world_size)
    ]
    if not all(shares):
        return Verdict(complaint=f"rank {shares.index(0)} owns nothing")
    next_token_loss(alone(tokens[:, :-1]), tokens[:, 1:]).backward()
    torch.optim.Adam(alone.parameters()).step()
    mine = tokens[rank : rank + 1]
    next_token_loss(model(mine[:, :-1]), mine[:, 1:]).backward()
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    owned = [p for p, owner in zip(parameters, owners, strict=True) if owner == rank]
    torch.optim.Adam(owned).step()
    for parameter, owner in zip(parameters, owners, strict=True):
        dist.broadcast(parameter.detach(), src=owner)
    apart = max(
        float((one - other).detach().abs().max())
        for one, other in zip(parameters, alone.parameters(), strict=True)
    )
    if max(of_all_ranks(apart)) > 1e-3:
        return Verdict(complaint="the weights are not those of one process")
    largest, to_beat = max(shares) / sum(sizes), 1.1 / world_size
    return Verdict(
        measured=f"right weights, and the largest owner has {largest:.0%}",
        to_beat=f"{to_beat:.0%} or less",
        is_beaten=largest <= to_beat,
    )


def _given(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [each for each in tensors if each is not None]


def _compare(
    parameters: Sequence[nn.Parameter],
    expected: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
) -> str:
    """What is wrong with the gradients in `parameters`, or with these; or ""."""
    for parameter, gradient, weight in zip(parameters, expected, weights, strict=True):
        assert gradient is not None
        if not torch.equal(parameter, weight):
            return "the weights have changed"
        if parameter.grad is None:
            return "a parameter has no gradient"
        if not torch.allclose(parameter.grad, gradient, rtol=1e-3, atol=1e-6):
            ratio = float(parameter.grad.norm() / gradient.norm())
            return (
                f"the gradient is another one: its norm is {ratio:.3g} times as large"
            )
    return ""


def _wrong_owners(owners: list[int], num_tensors: int, world_size: int) -> str:
    if len(owners) != num_tensors:
        told = f"there are {num_tensors} tensors and {len(owners)} owners"
    elif strange := sorted({*owners} - {*range(world_size)}):
        told = f"there is no rank {strange[0]}"
    else:
        told = ""
    found = of_all_ranks(
        (told, sum(owner * 31**i % 997 for i, owner in enumerate(owners)))
    )
    if any(each[0] for each in found):
        return next(each[0] for each in found if each[0])
    return "" if len({each[1] for each in found}) == 1 else "the ranks do not agree"
