"""Deals global batches out to the ranks."""

import contextlib
import functools
import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler
from torch.utils.data import DataLoader
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler
from torch.utils.data import IterableDataset
from torch.utils.data import RandomSampler
from torch.utils.data import Sampler
from torch.utils.data import SequentialSampler
from torch.utils.data import TensorDataset
from torch.utils.data import default_collate

from labkit.checks import UnsupportedLoopError
from labkit.checks import check_count
from labkit.checks import short_repr
from labkit.rank.data.orders import DrawnOrder
from labkit.rank.data.orders import Order
from labkit.rank.data.orders import PlainOrder
from labkit.rank.data.orders import RandomNumbers
from labkit.rank.data.orders import as_bytes
from labkit.rank.data.orders import fingerprint_of
from labkit.rank.data.workers import Sendable
from labkit.strategies.mesh.peers import Peers

KEPT_OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "worker_init_fn",
    "persistent_workers",
    "timeout",
    "prefetch_factor",
    "multiprocessing_context",
)
"""What a DataLoader says of how its samples are loaded."""


NO_DATA = (
    "prepare got no dataset, and it divides one among the ranks: pass a dataset with "
    "batch_size=64, or a DataLoader. If the loop draws its batches itself, for example "
    "in get_batch(), put the drawing into an IterableDataset that yields single "
    "samples. If there are no samples to divide, as with a whole graph or episodes, "
    "pass any dataset, as in prepare(model, optimizer, range(1), batch_size=1), and "
    "seed random numbers alike on all ranks, which then do the same (see Loops without "
    "a loader in docs/howto/own_loop.md)"
)


@dataclass(frozen=True)
class Share:
    """A rank's part of one microbatch."""

    num_samples: int
    weight: float
    """What this rank's mean loss must be multiplied by, so that the average over the
    ranks, summed over the microbatches, is the mean over the global batch: 1 when
    there is one microbatch and all parts are equal."""
    is_last: bool = True
    """Whether the optimizer steps after this microbatch."""
    num_tokens: int = 0
    """Of all its samples, where these are sequences of tokens."""
    is_sum: bool = False
    """Whether the loss is a sum over the samples, no mean."""
    loss_weight: float | None = None
    """What this rank's loss counts for in the mean over the ranks; None where that is
    the number of its samples."""
    fingerprint: int = 0
    """Of the pass up to this global batch: see `labkit.rank.data.orders.Order`."""
    is_even: bool = True
    """Whether all ranks have as many samples."""


def part_of(length: int, part: int, num_parts: int, least: int = 1) -> slice:
    """Part `part` of `length` elements, cut into `num_parts` whose sizes differ
    by one at most. A part has `least` elements or more; where there are too few for
    that, the last parts are empty."""
    num_used = min(num_parts, max(1, length // least))
    if part >= num_used:
        return slice(length, length)
    return slice(-(-part * length // num_used), -(-(part + 1) * length // num_used))


@functools.lru_cache(maxsize=64)
def places_in(
    length: int, accumulate: int, rank: int, num_ranks: int, least: int
) -> list[tuple[int, int]]:
    """Where a rank's part of each microbatch of so many samples begins, and how many it
    has."""
    found = []
    for number in range(accumulate):
        micro = part_of(length, number, accumulate, least)
        own = part_of(micro.stop - micro.start, rank, num_ranks, least)
        found.append((micro.start + own.start, own.stop - own.start))
    return found


@dataclass(frozen=True)
class Dealer:
    """Cuts global batches into `accumulate` microbatches, and each of them into a part
    for each rank, all contiguous.

    Parts may be unequal, and a rank may have none: it then gets the batch's first
    sample with weight 0, so that it takes part in every collective and counts for
    nothing. The first rank has none only where no rank has.
    """

    peers: Peers
    accumulate: int = 1
    least: int = 1
    """Samples of a part, unless it is empty or all there is."""
    is_sum: bool = False
    """Whether losses are sums over the samples, not means."""
    own_team: Peers | None = None
    """The ranks that train one model, also those with other parts of it for the same
    samples; None where these are the `peers`."""

    @property
    def team(self) -> Peers:
        """The ranks that need the same dataset, in the same order."""
        return self.own_team or self.peers

    def cut(self, batch: Any) -> list[tuple[Any, int]]:
        """This rank's part of each microbatch, and how many samples it counts for."""
        found = []
        places = places_in(
            len(batch), self.accumulate, self.peers.rank, self.peers.size, self.least
        )
        for first, num_samples in places:
            part = batch[first : first + num_samples]
            found.append((part, num_samples) if num_samples else (stand_in(batch), 0))
        return found

    def share(
        self, num_samples: int, size: int, number: int, fingerprint: int
    ) -> Share:
        """Of microbatch `number` of a global batch of `size` samples."""
        weight = num_samples * self.peers.size / size
        if self.is_sum:
            weight = float(self.peers.size if num_samples else 0)
        return Share(
            num_samples,
            weight,
            is_last=number == self.accumulate - 1,
            is_sum=self.is_sum,
            loss_weight=1.0 if self.is_sum else None,
            fingerprint=fingerprint,
            is_even=self._is_even(size, number),
        )

    def _is_even(self, size: int, number: int) -> bool:
        """Whether all ranks have as many samples of a microbatch."""
        micro = part_of(size, number, self.accumulate, self.least)
        length, num_ranks = micro.stop - micro.start, self.peers.size
        is_for_all = num_ranks == 1 or length // self.least >= num_ranks
        return not length or (is_for_all and length % num_ranks == 0)

    @property
    def weight_outside(self) -> float:
        """As `Share.weight`, for microbatches that do not come from this loader."""
        return self.peers.size if self.is_sum else 1.0 / self.accumulate


def stand_in(batch: Any) -> Any:
    """The first sample, twice: BatchNorm takes no less of some shapes. Where the batch
    is one sample, that one: a loop may expect it, as one with `x.squeeze(0)` does."""
    if len(batch) == 1:
        return batch
    return batch[[0, 0]] if isinstance(batch, np.ndarray) else [batch[0], batch[0]]


OF_ANOTHER_KIND = (TypeError, OverflowError)
"""What adding keys to an array raises that are no indices."""


def tensor_of(keys: Any) -> torch.Tensor:
    """Sample indices as a dataset of tensors takes them."""
    if isinstance(keys, np.ndarray):
        return torch.from_numpy(keys)  # a third of what `as_tensor` takes for these
    return torch.as_tensor(keys)


def numbers_of(keys: Any) -> Any:
    """Sample indices as a dataset takes them."""
    return keys.tolist() if isinstance(keys, np.ndarray) else keys


def add_numbers(numbers: list[np.ndarray], keys: Any) -> None:
    """Add sample indices, unless they are keys of another kind."""
    if isinstance(keys, np.ndarray):
        numbers.append(keys)
        return
    with contextlib.suppress(*OF_ANOTHER_KIND):
        numbers.append(np.array(array("q", keys)))


class GlobalBatches(Sampler[Any]):
    """This rank's sample indices in every microbatch of an epoch."""

    def __init__(self, order: Order, dealer: Dealer) -> None:
        self.order = order
        self.dealer = dealer
        self.source: DataLoader[Any] | None = None
        """The DataLoader of one process."""
        self.epoch = 0
        self.first = 0
        """The global batch that the next pass begins with."""
        self.first_fingerprint = 0
        """Of what this pass had before it."""
        self.as_tensors = False
        """Whether indices come as a tensor, for a dataset that takes one."""
        self.drawn: list[np.ndarray] = []
        """The samples of the last pass so far, without those that do not count."""
        self.dealt: list[np.ndarray] = []
        """Those of all ranks together."""
        self._shares: deque[Share] = deque()
        """Of the microbatches that are on their way."""

    @property
    def batch_size(self) -> int:
        return self.order.batch_size

    @property
    def is_by_seed(self) -> bool:
        """Whether the number of a pass decides its order, whatever was before it."""
        return isinstance(self.order, PlainOrder)

    @property
    def num_batches(self) -> int:
        """Global batches of an epoch: optimizer steps. TypeError if nobody knows."""
        return len(self.order)

    @property
    def facts(self) -> dict[str, Any]:
        return self.order.facts

    def __len__(self) -> int:
        """Microbatches of an epoch."""
        return self.num_batches * self.dealer.accumulate

    def __iter__(self) -> Iterator[Any]:
        self._shares.clear()
        self.drawn, self.dealt = [], []
        shares: dict[int, tuple[Any, Share]] = {}  # by microbatch, the last one
        for place, (batch, fingerprint) in enumerate(self.order.batches(self.epoch)):
            if place < self.first:
                self.first_fingerprint = fingerprint
                continue
            size = len(batch)
            for number, (part, num_samples) in enumerate(self.dealer.cut(batch)):
                facts = num_samples, size, number, fingerprint
                known, share = shares.get(number, (None, None))
                if share is None or known != facts:
                    share = self.dealer.share(*facts)
                    shares[number] = facts, share
                self._shares.append(share)
                add_numbers(self.drawn, part[:num_samples])
                yield tensor_of(part) if self.as_tensors else numbers_of(part)
            add_numbers(self.dealt, batch)

    def deal(self, loader: DataLoader[Any]) -> Iterator[tuple[Any, Share]]:
        """Each microbatch of a pass over `loader`, which has this for its sampler."""
        # A DataLoader draws a random number when a pass begins: where that is one
        # which had begun, it has been drawn.
        state = torch.get_rng_state() if self.first else None
        passing: Iterator[Any] = iter(loader)
        if state is not None:
            torch.set_rng_state(state)
        if self.as_tensors and not (loader.num_workers or loader.pin_memory):
            # What the DataLoader would do, whose own work takes longer than this.
            dataset, collate = loader.dataset, loader.collate_fn
            passing = (collate(dataset[keys]) for keys in self)
        while batch := list(itertools.islice(passing, 1)):
            yield batch.pop(), self._shares.popleft()  # the loop's alone, to drop it

    def skip_pass(self) -> None:
        """Leave out a pass that an earlier run has had."""
        self.order.skip(self.epoch)


class Stream:
    """This rank's part of what an IterableDataset yields, on every rank the same.

    Every rank goes through the whole stream, under random numbers that are equal on
    all ranks, and collates its own samples only. With each global batch ranks compare
    what they found, so that none waits for one whose stream has ended.
    """

    def __init__(self, source: DataLoader[Any], dealer: Dealer, *, seed: int) -> None:
        assert source.batch_size is not None
        self.dataset = source.dataset
        self.batch_size = source.batch_size
        self.source: DataLoader[Any] | None = None
        """The DataLoader of one process."""
        self.dealer = dealer
        self.epoch = 0
        self.first = 0
        self.first_fingerprint = 0
        self.drawn: list[np.ndarray] = []
        self.dealt: list[np.ndarray] = []
        self.generator = source.generator or torch.Generator()
        """What workers are seeded from."""
        self._has_own_generator = source.generator is not None
        self.is_by_seed = False
        self._is_here = source.num_workers == 0
        """Whether this process, no worker, goes through the stream."""
        self._seed = seed

    @property
    def num_batches(self) -> int:
        return -(-len(self.dataset) // self.batch_size)  # type: ignore[arg-type]

    @property
    def facts(self) -> dict[str, Any]:
        name = type(self.dataset).__name__
        return {"batch_size": self.batch_size, "stream": name}

    def __len__(self) -> int:
        return self.num_batches * self.dealer.accumulate

    def deal(self, loader: DataLoader[Any]) -> Iterator[tuple[Any, Share]]:
        """Each microbatch of a pass over `loader`, whose collate_fn is a
        `CollateParts`."""
        numbers: Any = contextlib.nullcontext()
        if self._is_here:
            numbers = RandomNumbers(self._seed + self.epoch)
        if not self._has_own_generator:
            self.generator.manual_seed(self._seed + self.epoch)
        with numbers:
            passing = iter(loader)
        fingerprint = 0
        for place in itertools.count():
            with numbers:
                found = next(passing, None)
            value = -1
            if found is not None:
                size, own, parts = found
                value = fingerprint = zlib.crc32(
                    repr((size, own)).encode(), fingerprint
                )
            if not self.dealer.team.agree_on(value, apart=True):
                name = type(self.dataset).__name__
                raise UnsupportedLoopError(
                    f"{name} does not yield the same samples on every rank (from batch "
                    f"{place + 1} of the epoch on), and prepare divides one stream "
                    "among all of them; do not shard it by rank and world_size, and "
                    "seed it the same way on every rank, or use %%dist_train raw"
                )
            if found is None:
                return
            if place < self.first:
                self.first_fingerprint = fingerprint
                continue
            for number in range(len(parts)):
                num_samples = parts[0][1]
                share = self.dealer.share(num_samples, size, number, fingerprint)
                yield parts.pop(0)[0], share  # one that is had may be dropped

    def skip_pass(self) -> None:
        """A stream starts over in every pass."""


@dataclass(frozen=True)
class CollateParts:
    """Makes of the samples of a global batch this rank's microbatches."""

    collate: Callable[[list[Any]], Any]
    dealer: Dealer

    def __call__(self, samples: list[Any]) -> Any:
        """The number of samples, a fingerprint of them, and the microbatches."""
        ends = as_bytes([samples[0], samples[-1]])
        parts = [(self.collate(part), n) for part, n in self.dealer.cut(samples)]
        return len(samples), zlib.crc32(ends), parts


def as_list(batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Collates what is a batch already, in the form that `default_collate` gives."""
    return list(batch)


def shard_dataset(
    source: Dataset[Any] | DataLoader[Any] | None,
    dealer: Dealer,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    keep_last: bool = False,
) -> tuple[DataLoader[Any], GlobalBatches | Stream]:
    """A DataLoader over this rank's part of `source`, and the batches it deals.
    Collective: the ranks compare their datasets.

    `batch_size` counts the samples of all ranks together. A DataLoader keeps its
    batch size (which is then the global one), sampler, `collate_fn` and workers;
    `keep_last` has it keep a last batch that it would drop.
    """
    loader = as_loader(source, batch_size, shuffle=shuffle)
    check_microbatches(loader, dealer)
    check_same_dataset(loader.dataset, dealer.team)
    drop_last = loader.drop_last and not keep_last
    dealt: tuple[DataLoader[Any], GlobalBatches | Stream]
    if isinstance(loader.dataset, IterableDataset):
        dealt = deal_stream(loader, dealer, seed=seed, drop_last=drop_last)
    else:
        order = order_of(loader, dealer.team, seed=seed, drop_last=drop_last)
        dealt = deal_samples(loader, GlobalBatches(order, dealer))
    dealt[1].source = loader
    return dealt


def as_loader(
    source: Dataset[Any] | DataLoader[Any] | None,
    batch_size: int | None,
    *,
    shuffle: bool,
) -> DataLoader[Any]:
    """A DataLoader as one process would have it; ValueError for what cannot be one."""
    if source is None:
        raise UnsupportedLoopError(NO_DATA)
    if isinstance(source, DataLoader):
        check_loader(source, batch_size)
        return source
    check_dataset(source)
    shuffles = shuffle and not isinstance(source, IterableDataset)
    return DataLoader(source, checked_batch_size(batch_size), shuffle=shuffles)


def deal_stream(
    source: DataLoader[Any], dealer: Dealer, *, seed: int, drop_last: bool
) -> tuple[DataLoader[Any], Stream]:
    """Every rank reads all of the stream, and collates its own samples."""
    stream = Stream(source, dealer, seed=seed)
    options = kept_options(source, CollateParts(source.collate_fn, dealer))
    options["generator"] = stream.generator
    loader = DataLoader(
        source.dataset, source.batch_size, drop_last=drop_last, **options
    )
    return loader, stream


def deal_samples(
    source: DataLoader[Any], batches: GlobalBatches
) -> tuple[DataLoader[Any], GlobalBatches]:
    """Every rank loads its own samples, by their indices."""
    dataset, options = source.dataset, kept_options(source)
    if type(dataset) is TensorDataset and source.collate_fn is default_collate:
        # Index the tensors once a batch, not once a sample: the same values.
        options = kept_options(source, as_list)
        batches.as_tensors = True
    elif source.batch_sampler is not None:
        return DataLoader(dataset, batch_sampler=batches, **options), batches
    return DataLoader(dataset, batch_size=None, sampler=batches, **options), batches


def kept_options(
    loader: DataLoader[Any], collate: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """How a DataLoader loads its samples, with another `collate` if given."""
    found = {name: getattr(loader, name) for name in KEPT_OPTIONS}
    found["collate_fn"] = collate or loader.collate_fn
    if loader.num_workers:
        found["collate_fn"] = Sendable(found["collate_fn"])
    return found


def order_of(
    loader: DataLoader[Any], team: Peers, *, seed: int, drop_last: bool
) -> Order:
    """The order in which a DataLoader has its samples."""
    sampler: Any = loader.sampler
    if loader.batch_size is not None:
        is_shuffled = type(sampler) is RandomSampler and (
            not sampler.replacement
            and sampler.generator is None
            and sampler.num_samples == len(sampler.data_source)
        )
        if is_shuffled or type(sampler) is SequentialSampler:
            return PlainOrder(
                sampler.data_source,
                loader.batch_size,
                shuffle=is_shuffled,
                team=team,
                drop_last=drop_last,
                seed=seed,
            )
        batch_sampler: Any = BatchSampler(sampler, loader.batch_size, drop_last)
    else:
        batch_sampler = loader.batch_sampler or sampler
    dataset: Any = loader.dataset
    return DrawnOrder(
        batch_sampler,
        team,
        num_samples=len(dataset) if hasattr(dataset, "__len__") else None,
        seed=seed,
        generator=loader.generator,
    )


def check_microbatches(loader: DataLoader[Any], dealer: Dealer) -> None:
    """ValueError unless a batch has a sample for every microbatch."""
    if loader.batch_size is not None and dealer.accumulate > loader.batch_size:
        raise ValueError(
            f"--accumulate {dealer.accumulate}: a batch of {loader.batch_size} cannot "
            f"be split into {dealer.accumulate} microbatches; choose a smaller K or a "
            "larger batch size"
        )


def check_same_dataset(dataset: Any, team: Peers) -> None:
    """UnsupportedLoopError unless all ranks have the same dataset. Collective."""
    if not team.agree_on(fingerprint_of(dataset)):
        raise UnsupportedLoopError(
            "the dataset is not the same on every rank, and prepare divides one "
            "dataset among all of them; build the whole dataset with the same random "
            "seed on every rank, or use %%dist_train raw"
        )


def check_dataset(dataset: Any) -> None:
    """ValueError unless prepare can number the samples of a dataset."""
    if isinstance(dataset, IterableDataset):
        return
    if isinstance(dataset, str | bytes | Path):
        raise ValueError(
            f"the dataset is {short_repr(dataset)}; give a dataset or a DataLoader, "
            "for example labkit.data.digits(), and not its name or path"
        )
    if isinstance(dataset, FunctionType | type):
        raise ValueError(
            f"the dataset is {dataset.__name__} itself; call it, and give what it "
            f"returns: {dataset.__name__}(...)"
        )
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} has no length, and labkit divides samples among "
            "the ranks by their index; give it a map-style dataset (__len__ and "
            "__getitem__) or an IterableDataset"
        )
    if not len(dataset):
        raise ValueError(
            f"the dataset is empty: len() of the {type(dataset).__name__} is 0; give "
            "one with samples (check its path, its split and any filter)"
        )


def checked_batch_size(batch_size: int | None) -> int:
    """A number of samples, NumPy's too; ValueError for anything else."""
    if isinstance(batch_size, np.integer):
        batch_size = int(batch_size)  # which is all that a DataLoader takes
    check_count(
        "batch_size", batch_size, "the samples of all ranks together, for example 64"
    )
    assert batch_size is not None
    return batch_size


def check_loader(loader: DataLoader[Any], batch_size: int | None) -> None:
    """ValueError unless the batches of a DataLoader can be dealt out."""
    own = loader.batch_size
    samplers: list[Any] = [loader.sampler, loader.batch_sampler]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise UnsupportedLoopError(
            "the DataLoader has a DistributedSampler, but labkit divides the samples "
            "among the ranks itself; make the DataLoader as for one process, without "
            "that sampler, and with the batch size of all ranks together"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UnsupportedLoopError(
            f"{type(loader).__name__} overrides DataLoader.__iter__, so labkit cannot "
            "divide its batches among the ranks; give a plain DataLoader, or the "
            "dataset with batch_size=N"
        )
    is_batched = loader.batch_sampler is not None
    if not is_batched and not isinstance(loader.sampler, BatchSampler):
        raise UnsupportedLoopError(
            "the DataLoader has batch_size=None, so each item is a batch already, "
            "which prepare cannot cut into the ranks' parts; have the dataset give "
            "single samples, and say batch_size=N"
        )
    if batch_size not in (None, own):
        whose = "that of its batch sampler" if own is None else str(own)
        raise ValueError(
            f"batch_size is {short_repr(batch_size)}, the DataLoader's own is {whose}; "
            "leave batch_size out to keep the DataLoader's"
        )
    if type(loader.sampler) in (RandomSampler, SequentialSampler):
        check_dataset(loader.dataset)
