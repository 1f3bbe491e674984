"""A loader over this rank's share of a dataset, for evaluation."""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

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


class AsGiven:
    """What a DataLoader says of itself, of the one that the loop gave: for a dataset,
    of the one that one process would have made of it. Its numbers are those of all
    ranks together."""

    source: DataLoader[Any]

    @property
    def dataset(self) -> Dataset[Any]:
        """What the samples come from."""
        return self.source.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch on all ranks together. None with a batch sampler."""
        return self.source.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is too small is left out."""
        return self.source.drop_last

    @property
    def num_workers(self) -> int:
        """Processes of each rank that load its samples."""
        return self.source.num_workers

    @property
    def sampler(self) -> Any:
        """What numbers the samples of all ranks."""
        return self.source.sampler

    @property
    def batch_sampler(self) -> Any:
        """What numbers the samples of each batch of all ranks."""
        return self.source.batch_sampler

    @property
    def collate_fn(self) -> Any:
        """What makes a batch of a rank's samples."""
        return self.source.collate_fn

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
    ) -> None:
        """`on_begin()` is called before each pass and `on_end()` after it, on every
        rank."""
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
        self._loader = DataLoader(
            dataset,
            batch_sampler=OwnBatches(len(dataset), source.batch_size, peers),
            **kept_options(source),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._peers.check(SHARE)
        self._on_begin()
        for batch in self._loader:
            self._peers.check(SHARE)  # also in the midst of a pass
            yield to_device(batch, self._peers.device)
        self._on_end()
