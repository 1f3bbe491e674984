"""A loader over this rank's share of a dataset, for evaluation."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data import DataLoader
from torch.utils.data import Dataset
from torch.utils.data import Sampler
from torch.utils.data import SequentialSampler

from labkit.checks import UnsupportedLoopError
from labkit.rank.data.dealing import check_dataset
from labkit.rank.data.dealing import check_loader
from labkit.rank.data.dealing import checked_batch_size
from labkit.rank.data.dealing import kept_options
from labkit.rank.data.dealing import part_of
from labkit.rank.data.devices import to_device
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.mesh.worlds import SHARE

BATCHES_SET = (
    "the loop sets loader.batch_sampler.{name}, and prepare has divided the samples "
    "among the ranks by what it was. Give prepare a DataLoader with a batch sampler of "
    "the loop's own, DataLoader(dataset, batch_sampler=BatchSampler(sampler, 16, "
    "False)): what is set of that between two epochs counts in the next"
)
LOADER_SET = (
    "the loop sets loader.{name}, and prepare has made each rank's loader of what it "
    "was. Set it of the DataLoader before prepare; what is to change between epochs "
    "can be an attribute of a dataset, a batch sampler or a collate_fn of the loop's "
    "own (an object with __call__)"
)


class GivenAttribute:
    """An attribute of the DataLoader that the loop gave, for reading."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        return self if loader is None else getattr(loader.source, self._name)

    def __set__(self, loader: Any, value: Any) -> None:
        raise UnsupportedLoopError(LOADER_SET.format(name=self._name))


class AsGiven:
    """What a DataLoader says of itself, of the one that the loop gave: for a dataset,
    of the one that one process would have made of it. Its numbers are those of all
    ranks together."""

    source: DataLoader[Any]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of this DataLoader, for `isinstance`."""
        return type(self.source)

    dataset = GivenAttribute("What the samples come from.")
    batch_size = GivenAttribute("Of all ranks together; None with a batch sampler.")
    drop_last = GivenAttribute("Whether a last batch that is too small is left out.")
    num_workers = GivenAttribute("Processes of each rank that load its samples.")
    sampler = GivenAttribute("What numbers the samples of all ranks.")
    batch_sampler = GivenAttribute("What numbers those of each batch.")
    collate_fn = GivenAttribute("What makes a batch of a rank's samples.")

    def check_batches(self) -> None:
        """UnsupportedLoopError where the loop has set how batches are made."""
        found = self.source.batch_sampler
        if self.source.batch_size is None or not isinstance(found, BatchSampler):
            return  # it is the loop's own, which may change
        for name in ("batch_size", "drop_last", "sampler"):
            if getattr(found, name) != getattr(self.source, name):
                raise UnsupportedLoopError(BATCHES_SET.format(name=name))

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        message = f"{kind!r} object has no attribute {name!r}"
        if hasattr(vars(self).get("source"), name):
            message += (
                ": of a DataLoader it has dataset, batch_size, drop_last, num_workers, "
                "sampler, batch_sampler and collate_fn; read others of the DataLoader "
                "before prepare"
            )
        raise AttributeError(message)


class OwnBatches(Sampler[list[int]]):
    """The samples of one rank, in the order of the dataset: as many batches on every
    rank, none of them empty."""

    def __init__(self, num_samples: int, batch_size: int, peers: Peers) -> None:
        size = peers.size
        own = part_of(num_samples, peers.rank, size)
        self.indices = range(num_samples)[own]
        # Of the rank with most samples, and so that the one with fewest has enough.
        here, most = -(-batch_size // size), -(-num_samples // size)
        self.num_batches = min(-(-most // here), num_samples // size)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.num_batches):
            part = part_of(len(self.indices), number, self.num_batches)
            yield list(self.indices[part])


def as_given(source: Any) -> Any:
    """What the loop gave, of a loader that an earlier run has made of it."""
    return source.source if isinstance(source, AsGiven) else source


class ShareLoader(AsGiven):
    """Yields this rank's share of a dataset, on its device: see
    `labkit.rank.data.loader.RankLoader.share`."""

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any],
        batch_size: int | None,
        peers: Peers,
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        while_had: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`on_begin()` is called before each pass and `on_end()` after it, on every
        rank; `while_had()` is entered as long as the loop has a batch."""
        source = as_given(source)
        if isinstance(source, DataLoader):
            check_loader(source, batch_size)
        else:
            check_dataset(source)
            source = DataLoader(source, checked_batch_size(batch_size))
        in_order = type(source.sampler) is SequentialSampler and not source.drop_last
        if source.batch_size is None or not in_order:
            raise UnsupportedLoopError(
                "loader.share got an IterableDataset, or a DataLoader with shuffle, a "
                "sampler or drop_last, and it divides all samples of a map-style "
                "dataset in their order; give it a map-style dataset, or a DataLoader "
                "of one without these"
            )
        dataset: Any = source.dataset
        if len(dataset) < peers.size:
            raise UnsupportedLoopError(
                f"the number of samples is {len(dataset)}, so loader.share cannot give "
                f"each of {peers.size} ranks one; evaluate all of them on every "
                "rank, with a plain DataLoader"
            )
        self.source = source
        self._peers = peers
        self._on_begin = on_begin
        self._on_end = on_end
        self._while_had = while_had
        self._loader = DataLoader(
            dataset,
            batch_sampler=OwnBatches(len(dataset), source.batch_size, peers),
            **kept_options(source),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._peers.check(SHARE)
        self.check_batches()
        self._on_begin()
        for batch in self._loader:
            self._peers.check(SHARE)  # also in the midst of a pass
            with self._while_had():
                yield to_device(batch, self._peers.device)
        self._on_end()
