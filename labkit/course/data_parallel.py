"""Judges the exercises on data parallelism and tuning, and times what a step is made
of."""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from numbers import Real
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.compat.torch import TorchDispatchMode
from labkit.course.collectives import Traffic
from labkit.course.exercise import Verdict
from labkit.course.exercise import of_all_ranks
from labkit.data import ByteWindows
from labkit.data import digits
from labkit.data import text
from labkit.models import GPT
from labkit.models import mlp
from labkit.models import next_token_loss

NUM_SAMPLES, BATCH_SIZE = 1438, 64
WORLD_SIZES = (2, 3, 4, 8)
BYTES_READ, LOSS_TO_BEAT = 65_536, 2.5
EPOCHS, SEEDS, MOST_WIDTH, ACCURACY_TO_BEAT = 10, 3, 512, 0.90

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

    The clock is the host's: all ranks have the same, and on a GPU it sees when work is
    handed to it.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[str, str, float, float]] = []
        """Lane, label, and the seconds at which a block began and ended."""

    def start(self) -> None:
        """Begin a step, on all ranks together."""
        self.blocks.clear()
        dist.barrier()
        self._last = time.perf_counter()

    def lap(self, label: str) -> None:
        """What was computed since the last lap is `label`."""
        now = time.perf_counter()
        self._note("compute", label, self._last, now)
        self._last = now

    def follow(self, label: str, begin: Callable[..., Any], *args: Any) -> dist.Work:
        """A message begins, with `begin(*args, async_op=True)`, and ends when the work
        that this gives is done."""
        # Before the call: a backend's thread may take the core, and be done with it.
        began = time.perf_counter()
        work: dist.Work = begin(*args, async_op=True)
        work.get_future().then(
            lambda _: self._note("messages", label, began, time.perf_counter())
        )
        return work

    def _note(self, lane: str, label: str, began: float, ended: float) -> None:
        self.blocks.append((lane, label, began, ended))


def best_bucket(bucket_cap_mb: float) -> Verdict:
    """Judge a `bucket_cap_mb` for DDP: of six layers' gradients few messages, none of
    them too large, and little in the last, which nothing can hide."""
    if not isinstance(bucket_cap_mb, Real) or bucket_cap_mb <= 0:
        return Verdict(
            complaint=f"bucket_cap_mb is {bucket_cap_mb!r}; choose a number of MiB "
            "above 0"
        )
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


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, as rings send them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            share = (dist.get_world_size() - 1) / dist.get_world_size()
            name = func.overloadpacket.__name__
            whole = 1 if "reduce_scatter" in name or "alltoall" in name else 0
            payload = sum(each.nbytes for each in _tensors_in(args[whole]))
            times = {"send": 1.0, "recv_": 0.0, "allreduce_": 2 * share}
            self.num_bytes += payload * times.get(name, share)
        return func(*args, **(kwargs or {}))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, list | tuple) else []
    return [tensor for part in parts for tensor in _tensors_in(part)]


Average = Callable[[torch.Tensor, dict[Any, Any]], torch.Tensor]


@dataclass(frozen=True)
class Sent:
    """What came of a training in which gradients were averaged in some way."""

    accuracy: float
    """On the test set."""
    share: float
    """Of the bytes that DDP sends."""
    are_equal: bool
    """Whether all ranks have the same weights."""


def train_with(average: Average, *, epochs: int = 20) -> Sent:
    """Train a perceptron on the digits, on all ranks, with SGD and no momentum.

    In every step `average(gradient, memory)` is called with this rank's gradient, all
    parameters in one flat tensor, and a dict of its own that it may write to; it
    returns the mean over the ranks, or what it makes of it.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    images, labels = (each.to(device) for each in digits().tensors)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp().to(device)
    parameters, memory = list(model.parameters()), dict[Any, Any]()
    num_bytes, num_steps = 0.0, 0
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(images), generator=generator).to(device)
        for batch in order.split(64)[:-1]:
            mine = batch[rank::num_ranks]
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            found = torch.autograd.grad(loss, parameters)
            gradient = torch.cat([each.flatten() for each in found])
            whole = gradient.nbytes
            with SentBytes() as sent:
                mean = average(gradient, memory)
            _must_be_like(mean, whole=gradient.numel())
            num_bytes += sent.num_bytes
            num_steps += 1
            parts = mean.split([parameter.numel() for parameter in parameters])
            with torch.no_grad():
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.sub_(part.view_as(parameter))
    images, labels = (each.to(device) for each in digits("test").tensors)
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    of_ranks = of_all_ranks(sum(p.double().sum().item() for p in parameters))
    ddp = 2 * whole * (num_ranks - 1) / num_ranks * num_steps
    return Sent(accuracy, num_bytes / ddp, len(set(of_ranks)) == 1)


def _must_be_like(mean: object, *, whole: int) -> None:
    found = f"{mean!r}"
    if isinstance(mean, torch.Tensor):
        if mean.shape == (whole,):
            return
        found = f"a tensor of shape {list(mean.shape)}"
    raise ValueError(
        f"the function returned {found}; it has to return the mean of the gradients, "
        f"a tensor of shape {[whole]} as the one that it gets"
    )


def ninety_at_five_percent(average: Average) -> Verdict:
    """Judge a way of averaging gradients, as `train_with` takes it."""
    found = train_with(average)
    share = max(of_all_ranks(found.share))
    accuracy = min(of_all_ranks(found.accuracy))
    return Verdict(
        measured=f"{accuracy:.0%} of the test set right, at {share:.1%} of DDP's bytes",
        to_beat="90% right, at 5.0% of the bytes",
        is_beaten=accuracy >= 0.9 and share <= 0.05,
        complaint=""
        if found.are_equal
        else "the ranks do not get the same mean, so they end with different weights",
    )


def lower_loss(batch_size: int, rate: Callable[[float], float]) -> Verdict:
    """Judge a batch size, of all ranks, and `rate(progress)`, the learning rate at a
    `progress` from 0 to 1: a small GPT reads as many bytes as every other answer's,
    and its loss is that on text which it has not read."""
    if not callable(rate):
        return Verdict(
            complaint=f"rate is {rate!r}; give a function of the progress, such as "
            "lambda progress: 1e-3"
        )
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sequence = 32
    num_steps = BYTES_READ // (batch_size * sequence) if batch_size > 0 else 0
    if batch_size < num_ranks or not num_steps:
        most = BYTES_READ // sequence
        return Verdict(
            complaint=f"a batch has {batch_size} samples; choose from {num_ranks}, one "
            f"for each rank, to {most}, with which there is a single step"
        )
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(context=sequence, dim=64, num_layers=1).to(device)
    adamw = torch.optim.AdamW(model.parameters())
    train, test = (text(None, sequence, split) for split in ("train", "test"))
    order = torch.Generator().manual_seed(0)
    for step in range(num_steps):
        adamw.param_groups[0]["lr"] = float(rate(step / num_steps))
        rows = torch.randint(len(train), (batch_size,), generator=order).tolist()
        mine = rows[rank::num_ranks]
        share = len(mine) / batch_size
        (share * _loss_of(model, train, mine, device)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        adamw.step()
        adamw.zero_grad()
    with torch.no_grad():
        loss = _loss_of(model, test, range(0, len(test), 16), device).item()
    # Of all ranks alike, but where their learning rates are not.
    losses = [f"{each:.2f}" for each in of_all_ranks(loss)]
    return Verdict(
        measured=f"a loss of {losses[0]} on new text after {num_steps} steps",
        to_beat=f"{LOSS_TO_BEAT:.2f}",
        is_beaten=loss <= LOSS_TO_BEAT,
        complaint="" if len(set(losses)) == 1 else "the ranks end with other weights",
    )


def best_in_a_minute(params: Mapping[str, Any]) -> Verdict:
    """`params` has the `lr` of Adam and the `width` of a perceptron; judged by the
    accuracy on digits of other writers, which no study has seen: the mean over several
    seeds, each trained in this process alone."""
    if set(params) != {"lr", "width"}:
        found = ", ".join(params) or "nothing"
        return Verdict(complaint=f"it has {found}; give lr and width")
    lr, width = params["lr"], params["width"]
    are_numbers = isinstance(lr, Real) and isinstance(width, Integral)
    if not (are_numbers and lr > 0 and 0 < width <= MOST_WIDTH):
        return Verdict(
            complaint=f"lr is {lr!r} and width {width!r}; choose more than 0, and a "
            f"whole width of {MOST_WIDTH} or less"
        )
    images, labels = digits().tensors
    test_images, test_labels = digits("test").tensors
    num_right = 0
    for seed in range(SEEDS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = mlp(num_hidden=width)
            adam = torch.optim.Adam(model.parameters(), lr=lr)
            for _ in range(EPOCHS):
                for rows in torch.randperm(len(images)).split(BATCH_SIZE):
                    F.cross_entropy(model(images[rows]), labels[rows]).backward()
                    adam.step()
                    adam.zero_grad()
        with torch.no_grad():
            num_right += int((model(test_images).argmax(1) == test_labels).sum())
    accuracy = num_right / (SEEDS * len(test_labels))
    return Verdict(
        measured=f"an accuracy of {accuracy:.0%} on other writers",
        to_beat=f"{ACCURACY_TO_BEAT:.0%}",
        is_beaten=accuracy >= ACCURACY_TO_BEAT,
    )


def _loss_of(
    model: nn.Module, source: ByteWindows, rows: Iterable[int], device: str
) -> torch.Tensor:
    pairs = zip(*(source[row] for row in rows), strict=True)
    x, y = (torch.stack(each).to(device) for each in pairs)
    return next_token_loss(model(x), y)


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
