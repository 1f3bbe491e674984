"""Judges the exercises on data parallelism, and times what a step is made of."""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.course.collectives import Traffic
from labkit.course.exercise import Verdict
from labkit.course.exercise import of_all_ranks

NUM_SAMPLES, BATCH_SIZE = 1438, 64
WORLD_SIZES = (2, 3, 4, 8)

Deal = Callable[[int, int, int, int, int], list[list[int]]]


def each_exactly_once(deal: Deal) -> Verdict:
    """`deal(num_samples, batch_size, epoch, rank, world_size)` gives a rank's batches,
    as lists of samples: of all ranks together each sample once, in every epoch in
    another order, and on every rank as many batches, of at most `batch_size`."""
    worst = 0
    for world_size in WORLD_SIZES:
        on = f"on {world_size} ranks"
        orders = []
        for epoch in range(2):
            batches = [
                [[int(sample) for sample in batch] for batch in dealt]
                for dealt in (
                    deal(NUM_SAMPLES, BATCH_SIZE, epoch, rank, world_size)
                    for rank in range(world_size)
                )
            ]
            counts = [len(each) for each in batches]
            if len(set(counts)) > 1:
                return Verdict(
                    complaint=f"{on} some have {min(counts)} batches and some "
                    f"{max(counts)}: those with more wait in their last all-reduce"
                )
            largest = max(len(batch) for each in batches for batch in each)
            if largest > BATCH_SIZE:
                return Verdict(
                    complaint=f"{on} a batch has {largest} samples, not {BATCH_SIZE}"
                )
            seen = Counter(s for each in batches for batch in each for s in batch)
            if strange := sorted(set(seen) - set(range(NUM_SAMPLES))):
                return Verdict(complaint=f"{on} there is a sample {strange[0]}")
            extra = sum(count - 1 for count in seen.values())
            worst = max(worst, extra + NUM_SAMPLES - len(seen))
            orders.append(batches)
        if orders[0] == orders[1]:
            return Verdict(complaint=f"{on} both epochs have the same order")
        if [s for each in orders[0] for batch in each for s in batch] == sorted(seen):
            return Verdict(complaint=f"{on} nothing is shuffled")
    return Verdict(
        measured=f"at worst {worst} samples are seen twice or never",
        to_beat="0",
        is_beaten=worst == 0,
    )


def one_collective_a_step(average: Callable[[nn.Module], Any]) -> Verdict:
    """Judge `average(model)`, after which each gradient is the mean over the ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    complaint, most = "", 0
    for sizes in ((64, 64, 10), (3, 1, 5, 1, 2)):
        model = _model_with_gradients(sizes, dist.get_rank()).to(device)
        replicas = [
            _model_with_gradients(sizes, rank).to(device)
            for rank in range(dist.get_world_size())
        ]
        with Traffic() as traffic:
            average(model)
        wrong = ""
        of_replicas = zip(*(each.parameters() for each in replicas), strict=True)
        named = zip(model.named_parameters(), of_replicas, strict=True)
        for (name, parameter), others in named:
            mean = torch.stack([_gradient_of(each) for each in others]).mean(dim=0)
            found = parameter.grad
            if found is None or not torch.allclose(found, mean, atol=1e-6):
                wrong = wrong or f"the gradient of {name} is not the mean"
            if not parameter.equal(others[0]):
                wrong = wrong or f"{name} itself has changed, not its gradient"
        for rank, (told, calls) in enumerate(
            of_all_ranks((wrong, traffic.calls.total()))
        ):
            complaint = complaint or (told and f"on rank {rank} {told}")
            most = max(most, calls)
    return Verdict(
        measured=f"{most} collectives for the model with the most layers",
        to_beat="1",
        is_beaten=most <= 1,
        complaint=complaint,
    )


def time_calls(
    calls: Mapping[str, Callable[[], Any]], *, turns: int = 60
) -> dict[str, float]:
    """Seconds that each call takes: the median of `turns`, of the slowest rank.

    The calls take turns, and the ranks begin each together. The same on every rank.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 3):  # the first few warm up
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - began)
    own = {name: median(each) for name, each in seconds.items()}
    by_rank = of_all_ranks(own)
    return {name: max(each[name] for each in by_rank) for name in calls}


class StepClock:
    """Notes what this rank does when in a step, as `timelines.draw_lanes` draws it.

    The clock is the host's: on a GPU it sees when work is handed to it.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[str, str, float, float]] = []
        """Lane, label, and the seconds at which a block began and ended."""

    def start(self) -> None:
        """Begin a step, on all ranks together."""
        self.blocks.clear()
        dist.barrier()
        self._zero = self._last = time.perf_counter()

    def lap(self, label: str) -> None:
        """What was computed since the last lap is `label`."""
        now = time.perf_counter()
        self._note("compute", label, self._last, now)
        self._last = now

    def follow(self, work: dist.Work, label: str) -> None:
        """A message has begun, and ends when `work` is done."""
        began = time.perf_counter()
        work.get_future().then(
            lambda _: self._note("messages", label, began, time.perf_counter())
        )

    def _note(self, lane: str, label: str, began: float, ended: float) -> None:
        self.blocks.append((lane, label, began - self._zero, ended - self._zero))


def best_bucket(bucket_cap_mb: float) -> Verdict:
    """Judge a `bucket_cap_mb` for DDP: of six layers' gradients few messages, none of
    them too large, and little in the last, which nothing can hide."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    sizes = (64, 512, 512, 512, 512, 512, 10)
    layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(sizes)]
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(device), bucket_cap_mb=bucket_cap_mb
    )
    sent: list[int] = []

    def count(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.buffer().nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, count)
    for _ in range(3):  # after the first step DDP forms its buckets again
        sent.clear()
        model(torch.ones(2, 64, device=device)).sum().backward()
    messages = "1 message" if len(sent) == 1 else f"{len(sent)} messages"
    largest, last = max(sent) / sum(sent), sent[-1] / sum(sent)
    return Verdict(
        measured=f"{messages}, the largest with {largest:.0%} of the bytes, "
        f"the last with {last:.0%}",
        to_beat="3 messages, none with more than 60%, the last with at most 10%",
        is_beaten=len(sent) <= 3 and largest <= 0.6 and last <= 0.1,
    )


def _model_with_gradients(sizes: tuple[int, ...], rank: int) -> nn.Module:
    """The same weights for every rank, gradients of its own."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(sizes)]
    model = nn.Sequential(*layers)
    own = torch.Generator().manual_seed(rank + 1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.randn(parameter.shape, generator=own)
    return model


def _gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
