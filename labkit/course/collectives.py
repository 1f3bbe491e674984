"""Judges exercises in sending tensors, by counting calls and bytes; times messages."""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.compat.c10d import FUNCTIONAL
from labkit.compat.torch import TorchDispatchMode
from labkit.course.exercise import Verdict
from labkit.course.exercise import of_all_ranks

Answer = Callable[..., Any]

MANY = 12_000
"""Elements of the tensor of which bytes are counted: so many ranks divide it."""
FEW = (1003, 1)
"""Elements of tensors that are to come out right as well."""
ENOUGH_S = 0.15
"""Calls on tensors of one size are repeated for so long."""


class Traffic(TorchDispatchMode):
    """Counts what this rank calls of torch.distributed, and the bytes it sends.

    Those that a collective sends are not counted: it is one call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        is_call = func.namespace in ("c10d", FUNCTIONAL)
        if is_call and name != "wait_tensor":
            self.calls[name] += 1
            if name == "send":
                self.sent_bytes += sum(each.nbytes for each in args[0])
        return func(*args, **(kwargs or {}))


def swap_two_ranks(answer: Answer) -> Verdict:
    """Judge `answer(tensor, a, b)`: the tensor of rank b on rank a, and the reverse.

    Counted is how often a rank calls torch.distributed.
    """
    last = several_ranks() - 1
    complaint, calls_of_two, calls_of_others = "", 0, 0
    for a, b in sorted({(0, last), (last, 0), (last - 1, last)}):
        tensors = [_whole_numbers(5, seed) for seed in range(last + 1)]
        sources = [{a: b, b: a}.get(each, each) for each in range(last + 1)]
        rank = dist.get_rank()
        with Traffic() as traffic:
            swapped = answer(tensors[rank].clone(), a, b)
        wrong = not _is_same(swapped, tensors[sources[rank]])
        found = of_all_ranks((wrong, traffic.calls.total()))
        for each, (is_wrong, calls) in enumerate(found):
            if is_wrong:
                told = f"after a swap of {a} and {b} rank {each} does not return"
                complaint = complaint or f"{told} what rank {sources[each]} had"
            if each in (a, b):
                calls_of_two = max(calls_of_two, calls)
            else:
                calls_of_others = max(calls_of_others, calls)
    others = f", each of the others {calls_of_others}" if last > 1 else ""
    return Verdict(
        measured=f"each of the two ranks makes {calls_of_two} calls{others}",
        to_beat="2 calls, and none on the others",
        is_beaten=calls_of_two <= 2 and not calls_of_others,
        complaint=complaint,
    )


def ring_all_reduce(answer: Answer) -> Verdict:
    """Judge `answer(tensor)`: the sum of all ranks' tensors, made of send and recv.

    Counted are the bytes that the busiest rank sends.
    """
    num_ranks = several_ranks()
    to_beat = 2 * (num_ranks - 1) / num_ranks
    complaint, is_beaten, measured = "", True, ""
    for size in (MANY, *FEW):
        tensors = [_whole_numbers(size, seed) for seed in range(num_ranks)]
        with Traffic() as traffic:
            total = answer(tensors[dist.get_rank()].clone())
        wrong = not _is_same(total, torch.stack(tensors).sum(dim=0))
        others = [*{*traffic.calls} - {"send", "recv", "recv_any_source", "barrier"}]
        found = of_all_ranks((wrong, others, traffic.sent_bytes))
        for rank, (is_wrong, names, _) in enumerate(found):
            if names:
                complaint = (
                    complaint or f"it calls {names[0]}; make it of send and recv"
                )
            if is_wrong:
                told = f"rank {rank} does not return the sum of {size} elements"
                complaint = complaint or told
        sent = max(each[2] for each in found)
        chunk = -(-size // num_ranks) * tensors[0].element_size()
        is_beaten = is_beaten and sent <= 2 * (num_ranks - 1) * chunk
        times = sent / tensors[0].nbytes
        measured = measured or f"a rank sends {times:.2f} times the tensor's bytes"
    return Verdict(measured, f"{to_beat:.2f} times or less", is_beaten, complaint)


def bytes_between_hosts(answer: Callable[[int, int, float, str], float]) -> Verdict:
    """Judge `answer(num_hosts, ranks_per_host, model_bytes, strategy)`: the bytes that
    the busiest host sends to others in a step, under ddp, fsdp and hsdp."""
    worst, where = 1.0, ""
    for num_hosts, ranks_per_host in ((1, 8), (2, 2), (2, 8), (3, 4), (16, 8)):
        for strategy in ("ddp", "fsdp", "hsdp"):
            told = f"{strategy} on {num_hosts} x {ranks_per_host} ranks"
            given = answer(num_hosts, ranks_per_host, 1e9, strategy)
            sent = _sent_to_others(num_hosts, ranks_per_host, 1e9, strategy)
            if not sent and given:
                complaint = f"{told} sends nothing to another host, not {given:.3g}"
                return Verdict(complaint=complaint)
            if sent and not given > 0:
                return Verdict(complaint=f"{told} sends more than {given:.3g} bytes")
            off = max(given / sent, sent / given) if sent else 1.0
            if off > max(worst, 1.005):
                worst, where = off, f", for {told}"
    return Verdict(
        measured=f"at worst it is {worst:.2f} times off{where}",
        to_beat="1.00",
        is_beaten=worst < 1.005,
    )


def _sent_to_others(
    num_hosts: int, ranks_per_host: int, model_bytes: float, strategy: str
) -> float:
    """Counted chunk by chunk, as rings pass them on."""
    ranks = range(num_hosts * ranks_per_host)
    hosts = [
        ranks[host * ranks_per_host :][:ranks_per_host] for host in range(num_hosts)
    ]
    sent = dict.fromkeys(range(num_hosts), 0.0)

    def ring(members: Sequence[int], times: int, whole_bytes: float) -> None:
        """So many all-gathers or reduce-scatters; an all-reduce is one of each."""
        pairs = list(zip(members, [*members[1:], members[0]], strict=True))
        for _ in range(times * (len(members) - 1)):
            for source, target in pairs:
                host = source // ranks_per_host
                if target // ranks_per_host != host:
                    sent[host] += whole_bytes / len(members)

    if strategy == "ddp":
        ring(ranks, 2, model_bytes)
    elif strategy == "fsdp":  # gathered forward and backward, gradients scattered
        ring(ranks, 3, model_bytes)
    else:
        for members in hosts:
            ring(members, 3, model_bytes)
        for peers in zip(*hosts, strict=True):  # each has a shard
            ring(peers, 2, model_bytes / ranks_per_host)
    return max(sent.values())


def time_by_size(
    call: Callable[[torch.Tensor], Any],
    sizes: Sequence[int],
    *,
    device: torch.device | str,
    turns: int = 15,
) -> list[float]:
    """Seconds that `call(tensor)` takes on tensors of `sizes` bytes.

    The ranks begin together. Of each turn the slowest rank counts, of all turns the
    fastest; there are fewer of large tensors. The same on every rank.
    """
    fastest = []
    for size in sizes:
        tensor = torch.ones(size // 4, device=device)
        taken: list[float] = []
        while len(taken) < turns and sum(taken) < ENOUGH_S:
            _synchronize(tensor)
            dist.barrier()
            began = time.perf_counter()
            call(tensor)
            _synchronize(tensor)
            taken.append(max(of_all_ranks(time.perf_counter() - began)))
        fastest.append(min(taken))
    return fastest


def several_ranks() -> int:
    """How many there are; ValueError where an exercise has nothing to exchange."""
    num_ranks = dist.get_world_size()
    if num_ranks < 2:
        raise ValueError("this exercise is for two ranks or more: %dist_start -n 2")
    return num_ranks


def _whole_numbers(size: int, seed: int) -> torch.Tensor:
    """Random numbers whose sums are exact in any order, on this rank's device."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1, 1000, (size,), generator=generator).float()
    return numbers.cuda() if dist.get_backend() == "nccl" else numbers


def _is_same(result: Any, expected: torch.Tensor) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and result.shape == expected.shape
        and bool((result == expected).all())
    )


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
