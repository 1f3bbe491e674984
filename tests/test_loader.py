"""All ranks of a world are made in this process: dealing out takes no communication."""

import itertools
import random
import re
import weakref
from collections import UserDict
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler
from torch.utils.data import DataLoader
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler
from torch.utils.data import IterableDataset
from torch.utils.data import RandomSampler
from torch.utils.data import Sampler
from torch.utils.data import SequentialSampler
from torch.utils.data import SubsetRandomSampler
from torch.utils.data import TensorDataset
from torch.utils.data import WeightedRandomSampler
from torch.utils.data import default_collate
from torch.utils.data import get_worker_info

from labkit.checks import UnsupportedLoopError
from labkit.rank.data.dealing import Dealer
from labkit.rank.data.dealing import GlobalBatches
from labkit.rank.data.dealing import Share
from labkit.rank.data.dealing import Stream
from labkit.rank.data.dealing import part_of
from labkit.rank.data.dealing import shard_dataset
from labkit.rank.data.devices import tensors_in
from labkit.rank.data.devices import to_device
from labkit.rank.data.loader import RankLoader
from labkit.rank.data.loader import count_of
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.mesh.peers import Pending

CPU = torch.device("cpu")

WORLDS = [1, 2, 3, 4]
# (samples, global batch): even, uneven last batch, last batch and every batch smaller
# than the world, one batch larger than the dataset.
SIZES = [(24, 12), (22, 12), (25, 12), (7, 3), (6, 2), (5, 1), (10, 64)]


class Squares(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is (i, i squared), made on demand."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(float(index)), torch.tensor(index**2)


def squares(num_samples: int) -> TensorDataset:
    """The same samples as a TensorDataset."""
    x = torch.arange(num_samples)
    return TensorDataset(x.float(), x**2)


def collate_by_name(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    return {
        "x": torch.stack([x for x, _ in samples]),
        "indices": [int(x) for x, _ in samples],
    }


class Announced(RankLoader):
    """A rank's loader that remembers what it announced."""

    def __init__(
        self, loader: DataLoader[Any], batches: GlobalBatches | Stream
    ) -> None:
        self.shares: list[Share] = []
        self.epochs: list[int] = []
        super().__init__(
            loader,
            batches,
            CPU,
            on_epoch=self.epochs.append,
            on_batch=lambda share, loader: self.shares.append(share),
            on_end=lambda: None,
        )


class Trusting(Peers):
    """A rank that takes the others to have what it has."""

    def agree_on(self, value: int, *, apart: bool = False) -> bool:
        return True

    def begin_gather(self, numbers: Any, *, apart: bool = False) -> Pending[Any]:
        return Pending(lambda: numbers[np.newaxis])


def all_ranks(
    source: Any, world_size: int, accumulate: int = 1, least: int = 1, **options: Any
) -> list[Announced]:
    """The loader of each rank."""
    options = {"batch_size": None, "shuffle": False, "seed": 0, **options}
    dealers = [
        Dealer(Trusting(rank, world_size, CPU), accumulate, least)
        for rank in range(world_size)
    ]
    return [Announced(*shard_dataset(source, dealer, **options)) for dealer in dealers]


def one_epoch(loaders: list[Announced]) -> list[list[list[int]]]:
    """For every global batch, the samples that count on each rank."""
    batches: list[list[list[int]]] = []
    for loader in loaders:
        loader.shares.clear()
        for number, (x, y) in enumerate(loader):
            torch.testing.assert_close(y, x.long() ** 2)
            if number == len(batches):
                batches.append([])
            num_samples = loader.shares[-1].num_samples
            if num_samples:
                assert len(x) == num_samples
            else:  # a stand-in: twice, but where the batch is one sample
                assert len(x) in (1, 2)
            batches[number].append(x.long().tolist()[:num_samples])
    return batches


def joined(batches: list[list[list[int]]]) -> list[list[int]]:
    return [list(chain.from_iterable(parts)) for parts in batches]


@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_share_global_batch_k_whatever_their_number(
    world_size: int, num_samples: int, batch_size: int
) -> None:
    loaders = all_ranks(Squares(num_samples), world_size, batch_size=batch_size)
    expected = [
        list(range(num_samples))[first : first + batch_size]
        for first in range(0, num_samples, batch_size)
    ]
    assert joined(one_epoch(loaders)) == expected
    assert {len(loader) for loader in loaders} == {len(expected)}


@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_parts_of_a_batch_differ_by_one_sample_at_most(
    world_size: int, num_samples: int, batch_size: int
) -> None:
    loaders = all_ranks(Squares(num_samples), world_size, batch_size=batch_size)
    for parts in one_epoch(loaders):
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
def test_shuffled_batches_hold_the_same_samples_on_any_number_of_ranks(
    num_samples: int, batch_size: int
) -> None:
    orders = []
    for world_size in WORLDS:
        loaders = all_ranks(
            Squares(num_samples), world_size, batch_size=batch_size, shuffle=True
        )
        orders.append([joined(one_epoch(loaders)) for _ in range(3)])
    assert orders[1:] == orders[:-1]
    for epoch in orders[0]:
        assert sorted(chain.from_iterable(epoch)) == list(range(num_samples))


def test_every_epoch_is_shuffled_again() -> None:
    loaders = all_ranks(Squares(50), 2, batch_size=50, shuffle=True)
    first, second, third = (joined(one_epoch(loaders))[0] for _ in range(3))
    assert first != second
    assert second != third
    assert list(range(50)) not in (first, second, third)


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        loaders = all_ranks(Squares(50), 2, batch_size=50, shuffle=True, seed=seed)
        return joined(one_epoch(loaders))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_order_does_not_depend_on_the_ranks_own_random_numbers() -> None:
    first, second = all_ranks(Squares(50), 2, batch_size=10, shuffle=True)
    torch.manual_seed(1)
    ours = [x.tolist() for x, _ in first]
    torch.manual_seed(2)
    theirs = [x.tolist() for x, _ in second]
    assert sorted(chain.from_iterable(ours + theirs)) == list(range(50))


def test_an_epoch_that_was_left_early_is_not_repeated() -> None:
    [loader] = all_ranks(Squares(50), 1, batch_size=10, shuffle=True)
    next(iter(loader))
    second_epoch = [x.tolist() for x, _ in loader]
    [other] = all_ranks(Squares(50), 1, batch_size=10, shuffle=True)
    list(other)
    assert second_epoch == [x.tolist() for x, _ in other]


@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_weighted_means_average_to_the_mean_of_the_global_batch(
    world_size: int, num_samples: int, batch_size: int
) -> None:
    torch.manual_seed(0)
    values = torch.randn(num_samples, dtype=torch.float64)
    loaders = all_ranks(Squares(num_samples), world_size, batch_size=batch_size)
    weighted = [
        [loader.shares[-1].weight * values[x.long()].mean() for x, _ in loader]
        for loader in loaders
    ]
    averages = torch.tensor(weighted, dtype=torch.float64).mean(dim=0)
    means = [
        values[k : k + batch_size].mean() for k in range(0, len(values), batch_size)
    ]
    torch.testing.assert_close(averages, torch.stack(means))


def test_weights_are_exactly_one_where_all_parts_are_equal() -> None:
    for world_size in WORLDS:
        loaders = all_ranks(Squares(24), world_size, batch_size=12)
        one_epoch(loaders)
        assert {share.weight for each in loaders for share in each.shares} == {1.0}


def test_a_rank_without_samples_takes_part_with_weight_0() -> None:
    loaders = all_ranks(Squares(2), 4, batch_size=2)
    parts = [[x.tolist() for x, _ in loader] for loader in loaders]
    shares = [loader.shares[0] for loader in loaders]
    one, none = Share(1, 2.0, is_even=False), Share(0, 0.0, is_even=False)
    assert shares == [one, one, none, none]
    assert parts == [[[0.0]], [[1.0]], [[0.0, 0.0]], [[0.0, 0.0]]]


def test_epochs_are_announced_from_one_and_shares_before_their_batch() -> None:
    [loader] = all_ranks(Squares(10), 1, batch_size=4)
    for epoch in (1, 2):
        loader.shares.clear()
        for number, (x, _) in enumerate(loader):
            assert loader.epochs[-1] == epoch
            assert len(loader.shares) == number + 1
            assert loader.shares[-1].num_samples == len(x)
    assert loader.epochs == [1, 2]


def test_tensors_in_any_structure_go_to_the_device() -> None:
    source = DataLoader(Squares(4), batch_size=2, collate_fn=collate_by_name)
    loader = RankLoader(
        *shard_dataset(
            source,
            Dealer(Peers(0, 1, CPU)),
            batch_size=None,
            shuffle=False,
            seed=0,
        ),
        torch.device("meta"),
        on_epoch=lambda epoch: None,
        on_batch=lambda share, loader: None,
        on_end=lambda: None,
    )
    for batch in loader:
        assert batch["x"].device.type == "meta"
        assert len(batch["indices"]) == 2
        moved = weakref.ref(batch["x"])
        del batch
        assert moved() is None  # the loader does not keep it


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from [(torch.zeros(3),)] * 8


@pytest.mark.parametrize("weigh", [None, len])
@pytest.mark.parametrize("data", [TensorDataset(torch.zeros(8, 3)), Streamed()])
def test_a_batch_that_is_on_the_device_already_is_the_loops_alone(
    data: Dataset[Any], weigh: Any
) -> None:
    meta = torch.device("meta")
    source = DataLoader(
        data,
        batch_size=4,
        collate_fn=lambda samples: [x.to(meta) for x in default_collate(samples)],
    )
    dealer = Dealer(Peers(0, 1, CPU), accumulate=2)
    loader = RankLoader(
        *shard_dataset(source, dealer, batch_size=None, shuffle=False, seed=0),
        meta,
        on_epoch=lambda epoch: None,
        on_batch=lambda share, loader: None,
        on_end=lambda: None,
        weigh=weigh,
    )
    for batch in loader:
        given = weakref.ref(batch[0])
        del batch
        assert given() is None


# ---- TensorDataset ----


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_tensor_dataset_gives_the_same_batches_as_any_other(
    world_size: int, shuffle: bool
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle}
    fast = all_ranks(squares(13), world_size, **options)
    slow = all_ranks(Squares(13), world_size, **options)
    for a, b in zip(fast, slow, strict=True):
        first, second = list(a), list(b)
        torch.testing.assert_close(first, second)
        assert {type(batch) for batch in first} == {type(batch) for batch in second}


def test_a_tensor_dataset_keeps_the_loaders_own_collate_fn() -> None:
    source = DataLoader(squares(6), batch_size=3, collate_fn=collate_by_name)
    [loader] = all_ranks(source, 1)
    assert [batch["indices"] for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_a_changed_getitem_of_a_tensor_dataset_is_used() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return 2 * x, y

    [loader] = all_ranks(Doubled(*squares(4).tensors), 1, batch_size=4)
    [(x, _)] = loader
    assert x.tolist() == [0, 2, 4, 6]


# ---- a DataLoader in place of a dataset ----


@pytest.mark.parametrize("make", [Squares, squares])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_dataloader_keeps_its_batches(
    world_size: int, drop_last: bool, make: Callable[[int], Dataset[Any]]
) -> None:
    source = DataLoader(make(11), batch_size=4, drop_last=drop_last)
    loaders = all_ranks(source, world_size)
    expected = [x.long().tolist() for x, _ in source]
    assert joined(one_epoch(loaders)) == expected
    assert {len(loader) for loader in loaders} == {len(source)}


def test_a_dataloader_keeps_its_collate_fn() -> None:
    source = DataLoader(Squares(8), batch_size=4, collate_fn=collate_by_name)
    loaders = all_ranks(source, 2)
    indices = [[batch["indices"] for batch in loader] for loader in loaders]
    assert indices == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_dataloader_decides_itself_whether_to_shuffle(
    shuffled: bool, asked: bool
) -> None:
    source = DataLoader(Squares(50), batch_size=50, shuffle=shuffled)
    [order] = joined(one_epoch(all_ranks(source, 2, shuffle=asked)))
    assert sorted(order) == list(range(50))
    assert (order != list(range(50))) == shuffled


def test_a_dataloader_keeps_its_workers() -> None:
    source = DataLoader(
        Squares(8), batch_size=4, num_workers=1, persistent_workers=True
    )
    [loader] = all_ranks(source, 1)
    assert loader.loader.num_workers == 1
    assert loader.loader.persistent_workers
    for _ in range(2):
        assert [x.tolist() for x, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("kind", [int, np.int64])
def test_a_batch_size_may_be_of_numpy(kind: type) -> None:
    [loader] = all_ranks(Squares(8), 1, batch_size=kind(4))
    assert [x.tolist() for x, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_workers_that_persist_see_the_order_of_every_epoch() -> None:
    source = DataLoader(
        Squares(20), batch_size=20, shuffle=True, num_workers=1, persistent_workers=True
    )
    [with_workers] = all_ranks(source, 1)
    [without] = all_ranks(Squares(20), 1, batch_size=20, shuffle=True)
    for _ in range(2):
        [(x, _)], [(expected, _)] = with_workers, without
        assert x.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "options", [{"timeout": 7}, {"prefetch_factor": 5}], ids=["timeout", "prefetch"]
)
def test_a_dataloader_keeps_the_options_of_its_workers(options: dict[str, Any]) -> None:
    source = DataLoader(Squares(8), batch_size=4, num_workers=1, **options)
    [loader] = all_ranks(source, 1)
    for name, value in options.items():
        assert getattr(loader.loader, name) == value


def test_the_same_batch_size_twice_is_no_contradiction() -> None:
    loaders = all_ranks(DataLoader(Squares(8), batch_size=4), 2, batch_size=4)
    assert joined(one_epoch(loaders)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# ---- a sampler of the user's own ----


def plain_batches(loader: Any) -> list[list[int]]:
    """What a plain loop over a DataLoader has."""
    return [x.long().tolist() for x, _ in loader]


class EverySecond(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, len(self.data_source), 2))

    def __len__(self) -> int:
        return len(self.data_source) // 2


class Forever(Sampler[int]):
    """Shuffles again and again, from torch's global random numbers."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(8).tolist()


class BySize(Sampler[list[int]]):
    """Batches of different sizes, as buckets by length have them."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[5, 1], [0, 2, 4, 6, 7], [3]])

    def __len__(self) -> int:
        return 3


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SAMPLED: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle with a generator": lambda: DataLoader(
        Squares(8), 3, shuffle=True, generator=seeded()
    ),
    "with replacement": lambda: DataLoader(
        Squares(8),
        3,
        sampler=RandomSampler(
            Squares(8), replacement=True, num_samples=20, generator=seeded()
        ),
    ),
    "fewer": lambda: DataLoader(
        Squares(8),
        3,
        sampler=RandomSampler(Squares(8), num_samples=5, generator=seeded()),
    ),
    "subset": lambda: DataLoader(
        Squares(8), 2, sampler=SubsetRandomSampler([1, 3, 5], seeded())
    ),
    "weighted": lambda: DataLoader(
        Squares(8),
        2,
        sampler=WeightedRandomSampler([1.0] * 8, 5, generator=seeded()),
        drop_last=True,
    ),
    "subclass": lambda: DataLoader(Squares(8), 3, sampler=EverySecond(Squares(8))),
    "a list": lambda: DataLoader(Squares(8), 3, sampler=[7, 7, 1, 0]),
    "TensorDataset": lambda: DataLoader(squares(8), 3, sampler=[7, 7, 1, 0]),
    "batch sampler": lambda: DataLoader(Squares(8), batch_sampler=BySize()),
    "torch's batch sampler": lambda: DataLoader(
        Squares(8),
        batch_sampler=BatchSampler(
            RandomSampler(Squares(8), generator=seeded()), 3, True
        ),
    ),
    "batches fetched at once": lambda: DataLoader(
        squares(8), batch_size=None, sampler=BatchSampler([7, 3, 2, 2, 1], 3, False)
    ),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", SAMPLED)
def test_the_order_of_a_sampler_is_that_of_a_plain_loop(
    name: str, world_size: int
) -> None:
    make = SAMPLED[name]
    # Each rank has made its own, and each pass draws again.
    loaders = [all_ranks(make(), world_size)[rank] for rank in range(world_size)]
    plain = make()
    for _ in range(2):
        expected = plain_batches(plain)
        assert joined(one_epoch(loaders)) == expected
    assert {len(loader) for loader in loaders} == {len(expected)}


@pytest.mark.parametrize("batch_size", [2, 3, 4])
@pytest.mark.parametrize("num_had", range(1, 5))
def test_a_pass_that_is_left_leaves_the_generator_as_a_plain_loop_does(
    num_had: int, batch_size: int
) -> None:
    def passes(loader: Any) -> list[list[int]]:
        found = []
        for _ in range(3):
            had = [x.tolist() for x, _ in itertools.islice(loader, num_had)]
            found += had
        return found

    def make() -> DataLoader[Any]:
        return DataLoader(Squares(8), batch_size, shuffle=True, generator=seeded())

    [alone] = all_ranks(make(), 1)
    assert passes(alone) == passes(make())


def test_a_sampler_without_a_generator_draws_the_same_on_every_rank() -> None:
    def dealt_to(rank: int, seed: int = 0) -> list[list[int]]:
        sampler = WeightedRandomSampler([1.0] * 50, 20)
        loader = all_ranks(a_loader(sampler=sampler, batch_size=5), 2, seed=seed)[rank]
        torch.manual_seed(rank)  # as prepare leaves it
        found = [plain_batches(loader) for _ in range(2)]
        assert torch.initial_seed() == rank
        assert found[0] != found[1]
        return [batch for epoch in found for batch in epoch]

    halves = [dealt_to(0), dealt_to(1)]
    assert [len(a) + len(b) for a, b in zip(*halves, strict=True)] == [5] * 8
    assert dealt_to(0) == halves[0]
    assert dealt_to(0, seed=1) != halves[0]
    [alone] = all_ranks(
        a_loader(sampler=WeightedRandomSampler([1.0] * 50, 20), batch_size=5), 1
    )
    whole = [a + b for a, b in zip(*halves, strict=True)]
    assert [*plain_batches(alone), *plain_batches(alone)] == whole


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("generator", [seeded, lambda: None])
def test_a_pass_of_any_length_is_drawn_as_it_goes_on(
    generator: Callable[[], Any], replacement: bool
) -> None:
    def make() -> DataLoader[Any]:
        sampler = RandomSampler(
            Squares(8),
            replacement=replacement,
            num_samples=10**10,
            generator=generator(),
        )
        return DataLoader(Squares(8), 6, sampler=sampler)

    def some(loader: Any) -> list[list[int]]:
        had = [
            [x.long().tolist() for x, _ in itertools.islice(loader, number)]
            for number in (7, 120)
        ]
        return [batch for each in had for batch in each]

    first, second = [some(all_ranks(make(), 2)[rank]) for rank in range(2)]
    batches = [a + b for a, b in zip(first, second, strict=True)]
    if generator():
        assert batches == some(make())
    else:
        assert batches == some(all_ranks(make(), 1)[0])
    assert len(all_ranks(make(), 1)[0]) == len(make())


def test_a_pass_of_any_length_resumes() -> None:
    def make(generator: Any) -> DataLoader[Any]:
        sampler = RandomSampler(
            Squares(8), replacement=True, num_samples=10**10, generator=generator
        )
        return DataLoader(Squares(8), 6, sampler=sampler)

    [whole], [resumed] = all_ranks(make(None), 1), all_ranks(make(None), 1)
    next(iter(whole))
    batches = iter(whole)
    next(batches), next(batches)
    resumed.resume_at = whole.position
    assert list(resumed) == []
    assert next(iter(resumed))[0].tolist() == next(batches)[0].tolist()
    [unknown] = all_ranks(make(seeded()), 1)
    unknown.resume_at = whole.position
    with pytest.raises(UnsupportedLoopError, match="Leave out generator="):
        list(unknown)


def test_a_sampler_without_an_end_has_no_length() -> None:
    loaders = all_ranks(DataLoader(Squares(8), 4, sampler=Forever()), 2)
    with pytest.raises(TypeError):
        len(loaders[0])
    passes = [itertools.islice(loader, 300) for loader in loaders]
    batches = [
        x.tolist() + y.tolist()
        for (x, _), (y, _) in zip(*map(list, passes), strict=True)
    ]
    assert len(batches) == 300
    for first, second in itertools.pairwise(batches):
        if batches.index(first) % 2 == 0:
            assert len(first + second) == 8
    assert len({tuple(batch) for batch in batches}) > 100


# ---- a stream ----


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """Squares one after the other, from `first` on, shuffled in pairs if asked to."""

    def __init__(self, num_samples: int, *, shuffle: bool = False) -> None:
        self.num_samples = num_samples
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.num_samples, step):
            if self.shuffle:
                number = random.randrange(self.num_samples)
            yield torch.tensor(float(number)), torch.tensor(number**2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_stream_gives_the_batches_of_a_plain_loop(
    world_size: int, drop_last: bool, num_workers: int
) -> None:
    source = DataLoader(
        Numbers(11), batch_size=4, drop_last=drop_last, num_workers=num_workers
    )
    expected = [sorted(x.long().tolist()) for x, _ in source]
    loaders = all_ranks(source, world_size)
    for _ in range(2):
        found = joined(one_epoch(loaders))
        assert [sorted(batch) for batch in found] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_shuffles_does_so_alike_on_every_rank(num_workers: int) -> None:
    def stream_of(world_size: int) -> list[list[int]]:
        source = DataLoader(
            Numbers(20, shuffle=True), batch_size=4, num_workers=num_workers
        )
        loaders = all_ranks(source, world_size)
        torch.manual_seed(world_size)
        return [*joined(one_epoch(loaders)), *joined(one_epoch(loaders))]

    found = stream_of(1)
    assert stream_of(2) == stream_of(3) == found
    assert found[:5] != found[5:]


def test_a_stream_has_weights_and_microbatches_as_any_data() -> None:
    streams = all_ranks(Numbers(22), 2, accumulate=2, batch_size=5)
    sampled = all_ranks(Squares(22), 2, accumulate=2, batch_size=5)
    assert one_epoch(streams) == one_epoch(sampled)
    for a, b in zip(streams, sampled, strict=True):
        assert [(s.num_samples, s.weight, s.is_last) for s in a.shares] == [
            (s.num_samples, s.weight, s.is_last) for s in b.shares
        ]


def test_a_stream_without_a_length_has_none() -> None:
    [loader] = all_ranks(Numbers(8), 1, batch_size=4)
    with pytest.raises(TypeError):
        len(loader)


# ---- what a loader says of itself ----


def test_a_loader_has_what_the_loop_knows_of_its_own() -> None:
    source = DataLoader(
        Squares(8), 4, shuffle=True, drop_last=True, collate_fn=collate_by_name
    )
    other = DataLoader(Squares(9), 4)
    rank = all_ranks(source, 2)[1]
    names = ["dataset", "batch_size", "drop_last", "num_workers", "sampler"]
    names += ["batch_sampler", "collate_fn"]
    for loader, plain in [(rank, source), (rank.share(other), other)]:
        for name in names:
            assert getattr(loader, name) is getattr(plain, name)
        with pytest.raises(AttributeError, match="collate_fn; read others of the Data"):
            loader.pin_memory  # noqa: B018
        with pytest.raises(AttributeError, match=r"no attribute 'batchsize'$"):
            loader.batchsize  # noqa: B018
    [of_dataset, _] = all_ranks(Squares(8), 2, batch_size=6)
    assert (of_dataset.batch_size, len(of_dataset.sampler)) == (6, 8)
    [of_batches, _] = all_ranks(SAMPLED["batch sampler"](), 2)
    assert of_batches.batch_size is None
    assert type(of_batches.batch_sampler) is BySize


def test_what_prepare_has_read_is_not_set_later() -> None:
    [loader] = all_ranks(DataLoader(Squares(8), 4), 1)
    with pytest.raises(UnsupportedLoopError, match=r"sets loader\.collate_fn"):
        loader.collate_fn = collate_by_name
    loader.batch_sampler.batch_size = 2
    with pytest.raises(UnsupportedLoopError, match=r"batch_sampler\.batch_size"):
        next(iter(loader))
    share = loader.share(DataLoader(Squares(8), 4))
    share.batch_sampler.drop_last = True
    with pytest.raises(UnsupportedLoopError, match=r"batch_sampler\.drop_last"):
        next(iter(share))


def test_a_batch_sampler_of_the_loops_own_may_change() -> None:
    sampler = BatchSampler(SequentialSampler(range(8)), 4, False)
    loaders = all_ranks(DataLoader(Squares(8), batch_sampler=sampler), 2)
    assert one_epoch(loaders) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    sampler.batch_size = 6
    assert one_epoch(loaders) == [[[0, 1, 2], [3, 4, 5]], [[6], [7]]]


# ---- where a pass goes on ----


@pytest.mark.parametrize(
    "make",
    [
        SAMPLED["with replacement"],
        SAMPLED["batch sampler"],
        lambda: DataLoader(Squares(8), 3, sampler=WeightedRandomSampler([1.0] * 8, 9)),
        lambda: DataLoader(Numbers(9, shuffle=True), 3),
        lambda: DataLoader(Numbers(9, shuffle=True), 3, num_workers=2),
    ],
)
def test_a_pass_resumes_where_it_was(make: Callable[[], DataLoader[Any]]) -> None:
    [whole] = all_ranks(make(), 1)
    list(whole)
    batches = iter(whole)
    next(batches)
    position = whole.position
    assert (position.epoch, position.batch) == (2, 1)
    expected = [x.tolist() for x, _ in batches]
    [resumed] = all_ranks(make(), 1)
    resumed.resume_at = position
    assert list(resumed) == []
    assert [x.tolist() for x, _ in resumed] == expected


def test_a_pass_does_not_resume_with_other_samples() -> None:
    [whole] = all_ranks(SAMPLED["weighted"](), 1)
    batches = iter(whole)
    next(batches)
    other = DataLoader(Squares(8), 2, sampler=WeightedRandomSampler([1.0] * 8, 5))
    [resumed] = all_ranks(other, 1, seed=9)
    resumed.resume_at = whole.position
    with pytest.raises(UnsupportedLoopError, match="--resume: epoch 1 does not begin"):
        list(resumed)


# ---- parts ----


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
@pytest.mark.parametrize("length", range(12))
def test_parts_are_of_two_samples_at_least_where_that_is_asked(
    length: int, num_parts: int
) -> None:
    parts = [
        list(range(length))[part_of(length, part, num_parts, 2)]
        for part in range(num_parts)
    ]
    assert list(chain.from_iterable(parts)) == list(range(length))
    assert all(len(part) != 1 for part in parts) or length == 1
    assert parts[0] or not length


# ---- weights ----


def test_microbatches_count_by_what_weigh_gives() -> None:
    loaders = all_ranks(Squares(6), 1, accumulate=2, batch_size=4)
    [loader] = [
        RankLoader(
            each.loader,
            each.batches,
            CPU,
            on_epoch=lambda epoch: None,
            on_batch=lambda share, loader: loaders[0].shares.append(share),
            on_end=lambda: None,
            weigh=lambda batch: batch[1].sum(),
        )
        for each in loaders
    ]
    assert len(list(loader)) == 4
    weights = [share.weight for share in loaders[0].shares]
    assert weights == [1 / 14, 13 / 14, 16 / 41, 25 / 41]


@pytest.mark.parametrize(
    "found", [-1, float("nan"), float("inf"), "x", None, torch.ones(2)]
)
def test_what_weigh_must_give_is_said(found: Any) -> None:
    with pytest.raises(ValueError, match="it must return what the mean"):
        count_of(lambda batch: found, None)


# ---- a share of another dataset ----


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("num_samples", [4, 5, 7, 12, 23])
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_share_has_every_sample_once_in_equally_many_batches(
    world_size: int, num_samples: int, batch_size: int
) -> None:
    shares = [
        loader.share(Squares(num_samples), batch_size=batch_size)
        for loader in all_ranks(Squares(4), world_size, batch_size=4)
    ]
    found = [[x.long().tolist() for x, _ in share] for share in shares]
    flat = [sample for batches in found for batch in batches for sample in batch]
    assert flat == list(range(num_samples))
    assert {len(batches) for batches in found} == {len(share) for share in shares}
    assert len({len(batches) for batches in found}) == 1
    assert all(batch for batches in found for batch in batches)


def test_a_share_keeps_the_options_of_a_dataloader() -> None:
    source = DataLoader(
        Squares(8), batch_size=4, collate_fn=collate_by_name, num_workers=1
    )
    first, second = all_ranks(Squares(8), 2, batch_size=4)
    assert [batch["indices"] for batch in first.share(source)] == [[0, 1], [2, 3]]
    assert [batch["indices"] for batch in second.share(source)] == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("source", "batch_size", "message"),
    [
        (Squares(8), None, "batch_size is None"),
        (Squares(1), 4, "is 1, so loader.share cannot give each of 2 ranks one"),
        (Numbers(8), 4, "loader.share got an IterableDataset"),
        (DataLoader(Squares(8), 4, shuffle=True), None, "sampler or drop_last"),
        (DataLoader(Squares(8), 4, drop_last=True), None, "or drop_last"),
        (DataLoader(Squares(8), batch_sampler=BySize()), None, "or drop_last"),
    ],
)
def test_what_cannot_be_shared_is_explained(
    source: Any, batch_size: Any, message: str
) -> None:
    [loader, _] = all_ranks(Squares(8), 2, batch_size=4)
    with pytest.raises(ValueError, match=message):
        loader.share(source, batch_size=batch_size)


# ---- devices ----


@dataclass(frozen=True)
class Pair:
    x: Tensor
    name: str = "a"


@dataclass
class Movable:
    device: str = "cpu"

    def to(self, device: torch.device) -> "Movable":
        return Movable(device.type)


class Graph:
    """A batch that moves itself."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.whole = x, self

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.x.to(device))


class Batch(dict[str, Any]):
    """A mapping of a class of its own."""


class Point(NamedTuple):
    x: Tensor
    y: int


@pytest.mark.parametrize(
    ("batch", "tensor_of"),
    [
        (UserDict(x=torch.ones(2)), lambda b: b["x"]),
        (Batch(x=torch.ones(2)), lambda b: b["x"]),
        ([{"a": UserDict(x=[torch.ones(2)])}], lambda b: b[0]["a"]["x"][0]),
        (Pair(torch.ones(2)), lambda b: b.x),
        (Point(torch.ones(2), 1), lambda b: b.x),
        (pack_sequence([torch.ones(2)]), lambda b: b.data),
        (Graph(torch.ones(2)), lambda b: b.x),
        (Movable(), lambda b: torch.ones(1, device=b.device)),
        ([Pair, "text", None, torch.ones(2)], lambda b: b[3]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_batches_of_any_class_go_to_the_device(
    batch: Any, tensor_of: Callable[[Any], Tensor]
) -> None:
    places = {tensor.device.type for tensor in tensors_in(batch)}
    assert places == (set() if isinstance(batch, Movable) else {"cpu"})
    moved = to_device(batch, torch.device("meta"))
    if places:  # but for the lengths of a PackedSequence
        assert "meta" in {tensor.device.type for tensor in tensors_in(moved)}
    assert type(moved) is type(batch)
    assert tensor_of(moved).device.type == "meta"
    if not isinstance(batch, Movable):
        assert tensor_of(batch).device.type == "cpu"  # the user's own stays


# ---- what cannot be dealt out ----


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Repeating(DataLoader[Any]):
    def __iter__(self) -> Any:
        return itertools.chain(super().__iter__(), super().__iter__())


def a_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Squares(8), **options)


@pytest.mark.parametrize(
    ("source", "batch_size", "message"),
    [
        (
            Squares(8),
            None,
            "batch_size is None; it must be a whole number, 1 or more: the samples",
        ),
        (Squares(8), True, "batch_size is True; it must be a whole"),
        (Squares(8), 4.0, "batch_size is 4.0; it must be a whole"),
        (Squares(8), 0, "batch_size is 0; it must be a whole number, 1 or more"),
        (Squares(8), -4, "batch_size is -4; it must be a whole number, 1 or more"),
        (Squares(0), 4, "the dataset is empty"),
        (None, 4, "pass any dataset, as in prepare(model, optimizer, range(1), batch"),
        (Numbers(8), None, "batch_size is None"),
        (Unsized(), 4, "Unsized has no length, and labkit divides samples"),
        (DataLoader(Numbers(8), batch_size=None), None, "has batch_size=None"),
        (a_loader(batch_size=None), 4, "has batch_size=None, so each item is a batch"),
        (a_loader(batch_size=4), 2, "batch_size is 2, the DataLoader's own is 4"),
        (a_loader(batch_sampler=BySize()), 2, "own is that of its batch sampler"),
        (Repeating(Squares(8), 4), None, "Repeating overrides DataLoader.__iter__"),
        (
            a_loader(batch_size=2, sampler=DistributedSampler(Squares(8), 2, 0)),
            None,
            "has a DistributedSampler, but labkit divides the samples",
        ),
        (
            a_loader(
                batch_sampler=BatchSampler(
                    DistributedSampler(Squares(8), 2, 0), 2, True
                )
            ),
            None,
            "has a DistributedSampler, but labkit divides the samples",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_explained(
    source: Any, batch_size: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        all_ranks(source, 2, batch_size=batch_size)


def test_a_batch_of_one_sample_is_one_on_every_rank() -> None:
    for loader in all_ranks(Squares(3), 2, batch_size=1):
        assert [len(x) for x, _ in loader] == [1, 1, 1]


@pytest.mark.parametrize("as_loader", [False, True])
def test_a_pass_has_the_samples_that_there_are_when_it_begins(as_loader: bool) -> None:
    dataset = Squares(8)
    source: Any = DataLoader(dataset, 4) if as_loader else dataset
    loaders = all_ranks(source, 2, batch_size=None if as_loader else 4)
    assert [len(loader) for loader in loaders] == [2, 2]
    assert list(chain(*joined(one_epoch(loaders)))) == list(range(8))
    for num_samples in (14, 14, 5):
        dataset.num_samples = num_samples
        assert {len(loader) for loader in loaders} == {-(-num_samples // 4)}
        assert list(chain(*joined(one_epoch(loaders)))) == list(range(num_samples))


def test_samples_that_one_rank_alone_has_got_are_refused() -> None:
    are_alike = [True]

    class Doubting(Trusting):
        def agree_on(self, value: int, *, apart: bool = False) -> bool:
            return are_alike[0]

    dataset = Squares(8)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 0}
    loader = Announced(*shard_dataset(dataset, Dealer(Doubting(0, 2, CPU)), **options))
    are_alike[0] = False
    assert len(list(loader)) == 2  # they are compared where they are others
    dataset.num_samples = 9
    with pytest.raises(UnsupportedLoopError, match="has 9 samples, and had 8 before"):
        list(loader)
