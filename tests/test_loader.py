"""All ranks of a world are made in this process: dealing out takes no communication."""

from collections.abc import Callable
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset
from torch.utils.data import IterableDataset
from torch.utils.data import SubsetRandomSampler
from torch.utils.data import TensorDataset
from torch.utils.data import WeightedRandomSampler

from labkit.rank.loader import GlobalBatches
from labkit.rank.loader import RankLoader
from labkit.rank.loader import Share
from labkit.rank.loader import deal_out

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

    def __init__(self, loader: DataLoader[Any], batches: GlobalBatches) -> None:
        self.shares: list[Share] = []
        self.epochs: list[int] = []
        super().__init__(
            loader,
            batches,
            CPU,
            on_epoch=self.epochs.append,
            on_batch=self.shares.append,
            on_end=lambda: None,
        )


def all_ranks(source: Any, world_size: int, **options: Any) -> list[Announced]:
    """The loader of each rank."""
    options = {"batch_size": None, "shuffle": False, "seed": 0, **options}
    return [
        Announced(*deal_out(source, rank=rank, world_size=world_size, **options))
        for rank in range(world_size)
    ]


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
            assert len(x) == max(num_samples, 1)
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


def test_every_epoch_is_shuffled_anew() -> None:
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
    assert shares == [Share(0, 0.0), Share(1, 2.0), Share(0, 0.0), Share(1, 2.0)]
    assert parts == [[[0.0]], [[0.0]], [[0.0]], [[1.0]]]


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
        *deal_out(source, batch_size=None, shuffle=False, rank=0, world_size=1, seed=0),
        torch.device("meta"),
        on_epoch=lambda epoch: None,
        on_batch=lambda share: None,
        on_end=lambda: None,
    )
    for batch in loader:
        assert batch["x"].device.type == "meta"
        assert len(batch["indices"]) == 2


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


# ---- what cannot be dealt out ----


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def a_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Squares(8), **options)


@pytest.mark.parametrize(
    ("source", "batch_size", "message"),
    [
        (
            Squares(8),
            None,
            "batch_size is None; it must be a whole number from 1: the samples",
        ),
        (Squares(8), True, "batch_size is True; it must be a whole"),
        (Squares(8), 4.0, "batch_size is 4.0; it must be a whole"),
        (Squares(8), 0, "batch_size is 0; it must be a whole number from 1"),
        (Squares(8), -4, "batch_size is -4; it must be a whole number from 1"),
        (Squares(0), 4, "the dataset is empty"),
        (Stream(), 4, "Stream has no length. Give it a map-style dataset"),
        (Unsized(), 4, "Unsized has no length. Give it a map-style dataset"),
        (DataLoader(Stream(), batch_size=4), None, "Stream has no length"),
        (a_loader(batch_size=None), 4, "batch_size=None or a batch_sampler"),
        (
            a_loader(
                batch_sampler=GlobalBatches(8, 2, rank=0, world_size=1, shuffle=False)
            ),
            None,
            "pass its dataset and batch_size=N instead",
        ),
        (a_loader(batch_size=4), 2, "batch_size is 2, the DataLoader's own is 4"),
    ],
)
def test_what_cannot_be_dealt_out_is_explained(
    source: Any, batch_size: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        all_ranks(source, 2, batch_size=batch_size)


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler([1, 3]),
        WeightedRandomSampler([1.0] * 8, num_samples=4),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_samples_that_a_dataloaders_sampler_leaves_out_are_never_dealt(
    sampler: Any,
) -> None:
    with pytest.raises(ValueError, match=type(sampler).__name__):
        all_ranks(a_loader(batch_size=2, sampler=sampler), 2)
