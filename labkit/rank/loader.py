"""Deals global batches out to the ranks."""

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data import Dataset
from torch.utils.data import IterableDataset
from torch.utils.data import RandomSampler
from torch.utils.data import Sampler
from torch.utils.data import SequentialSampler
from torch.utils.data import TensorDataset
from torch.utils.data import default_collate

from labkit.checks import check_count

_END = object()


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


class GlobalBatches(Sampler[Any]):
    """This rank's sample indices in every global batch of an epoch.

    Global batch k holds places k*B to (k+1)*B-1 of the epoch's order, on any number
    of ranks. It is cut into `accumulate` microbatches, and each of them into a part
    for each rank, all contiguous. Parts may be unequal, and a rank may have none: it
    then gets the batch's first sample with weight 0, so that it takes part in every
    collective and counts for nothing.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        shuffle: bool,
        drop_last: bool = False,
        seed: int = 0,
        accumulate: int = 1,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.accumulate = accumulate
        self.epoch = 0
        self.first = 0
        """The microbatch that the next pass begins with."""
        self.as_tensors = False
        """Whether indices come as a tensor, for a dataset that takes one."""
        self.drawn: list[int] = []
        """The samples of the last pass so far, without those that do not count."""

    @property
    def num_batches(self) -> int:
        """Global batches of an epoch: optimizer steps."""
        if self.drop_last:
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    @property
    def num_dealt(self) -> int:
        """Samples that all ranks draw together in an epoch."""
        return min(self.num_samples, self.num_batches * self.batch_size)

    def __len__(self) -> int:
        """Microbatches of an epoch."""
        return self.num_batches * self.accumulate

    def __iter__(self) -> Iterator[Any]:
        if self.shuffle:
            # The same order on every rank and for every number of ranks.
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator)
        else:
            order = torch.arange(self.num_samples)
        self.drawn = []
        for number in range(self.first, len(self)):
            first = number // self.accumulate * self.batch_size
            start, stop = self._bounds(number)
            part = order[first + start : first + stop]
            self.drawn += part.tolist()
            if not len(part):
                part = order[first : first + 1]
            yield part if self.as_tensors else part.tolist()

    def share(self, number: int) -> Share:
        """This rank's part of microbatch `number` of the epoch."""
        start, stop = self._bounds(number)
        return Share(
            stop - start,
            (stop - start) * self.world_size / self._size(number),
            is_last=(number + 1) % self.accumulate == 0,
        )

    def _size(self, number: int) -> int:
        """Samples of the global batch that microbatch `number` is a part of."""
        first = number // self.accumulate * self.batch_size
        return min(self.batch_size, self.num_samples - first)

    def _bounds(self, number: int) -> tuple[int, int]:
        """Where this rank's part lies in the global batch of microbatch `number`."""
        size, micro = self._size(number), number % self.accumulate
        start = micro * size // self.accumulate
        length = (micro + 1) * size // self.accumulate - start
        return (
            start + self.rank * length // self.world_size,
            start + (self.rank + 1) * length // self.world_size,
        )


@dataclass(frozen=True)
class Position:
    """Where a loop over a loader stands, on any number of ranks."""

    epoch: int
    """The number of its pass, counted from 1."""
    batch: int = 0
    """Global batches of that pass that it has had."""


class RankLoader:
    """Yields this rank's part of every global batch, on its device.

    `on_epoch(epoch)` is called before each pass, counted from 1, and `on_end()` after
    it; `before_batch()` when the loop asks for its next batch, or for one too many, and
    so has ended its work on the last; `on_batch(share)` before it is handed out;
    `on_drawn(indices, num_samples, epoch)` after a whole pass, with the samples that
    this rank had.

    With a position in `resume_at` the passes before it yield nothing, and its own
    begins after the batches that it had.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: GlobalBatches,
        device: torch.device,
        *,
        on_epoch: Callable[[int], None],
        on_batch: Callable[[Share], None],
        on_end: Callable[[], None],
        before_batch: Callable[[], None] = lambda: None,
        on_drawn: Callable[[list[int], int, int], None] = lambda *drawn: None,
    ) -> None:
        self.loader = loader
        self.batches = batches
        self.device = device
        self.resume_at = Position(1)
        self._on_epoch = on_epoch
        self._before_batch = before_batch
        self._on_batch = on_batch
        self._on_end = on_end
        self._on_drawn = on_drawn
        self.num_epochs = 0
        """Passes that have begun."""
        self._next: int | None = None
        """The microbatch that the loop has next; None between two passes."""

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def dataset(self) -> Dataset[Any]:
        return self.loader.dataset

    @property
    def position(self) -> Position:
        """Where its loop stands, between two optimizer steps."""
        if self._next is None:
            return Position(self.num_epochs + 1)
        return Position(self.num_epochs, self._next // self.batches.accumulate)

    def __iter__(self) -> Iterator[Any]:
        self.batches.epoch = self.num_epochs
        self.num_epochs += 1
        first = self._num_had()
        self._on_epoch(self.num_epochs)
        if first is None:
            return
        self.batches.first = self._next = first
        passing: Iterator[Any] | None = None
        try:
            for number in itertools.count(first):
                self._before_batch()
                if passing is None:
                    passing = self._begin_pass()
                batch = next(passing, _END)
                if batch is _END:
                    break
                share = self.batches.share(number)
                if length := tokens_of_sample(batch):
                    num_tokens = share.num_samples * length
                    share = dataclasses.replace(share, num_tokens=num_tokens)
                self._next = number + 1
                self._on_batch(share)
                yield to_device(batch, self.device)
            if not first:
                drawn = self.batches.drawn
                self._on_drawn(drawn, self.batches.num_dealt, self.num_epochs)
        finally:
            self._next = None
            self._on_end()

    def _num_had(self) -> int | None:
        """Microbatches of this pass that were had before; None if it was over."""
        if self.num_epochs < self.resume_at.epoch:
            return None
        if self.num_epochs > self.resume_at.epoch:
            return 0
        return self.resume_at.batch * self.batches.accumulate

    def _begin_pass(self) -> Iterator[Any]:
        """A DataLoader draws a random number when a pass begins: where that is one
        which had begun, it has been drawn."""
        if not self.batches.first:
            return iter(self.loader)
        state = torch.get_rng_state()
        passing = iter(self.loader)
        torch.set_rng_state(state)
        return passing


def tokens_of_sample(batch: Any) -> int:
    """T of a batch whose first tensor holds integers, (batch, T); otherwise 0."""
    first = batch[0] if isinstance(batch, list | tuple) and len(batch) else batch
    if isinstance(first, torch.Tensor) and first.ndim == 2:
        is_token = not (first.is_floating_point() or first.is_complex())
        return first.shape[1] if is_token and first.dtype != torch.bool else 0
    return 0


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of any structure with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch
    )


def as_list(batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Collates what is a batch already, in the form that `default_collate` gives."""
    return list(batch)


def deal_out(
    source: Dataset[Any] | DataLoader[Any],
    *,
    batch_size: int | None,
    shuffle: bool,
    rank: int,
    world_size: int,
    seed: int,
    accumulate: int = 1,
) -> tuple[DataLoader[Any], GlobalBatches]:
    """A DataLoader over this rank's part of `source`, and the batches it deals.

    `batch_size` counts the samples of all ranks together. A DataLoader keeps its
    batch size (which is then the global one), order, `collate_fn` and workers.
    """
    dataset: Any
    options: dict[str, Any] = {}
    drop_last = False
    if isinstance(source, DataLoader):
        if source.batch_size is None:
            raise ValueError(
                "prepare got a DataLoader with batch_size=None or a batch_sampler, "
                "which hides its batches; pass its dataset and batch_size=N instead"
            )
        if batch_size not in (None, source.batch_size):
            raise ValueError(
                f"batch_size is {batch_size}, the DataLoader's own is "
                f"{source.batch_size}; leave batch_size out to keep the DataLoader's"
            )
        dataset = source.dataset
        batch_size = source.batch_size
        shuffle = isinstance(source.sampler, RandomSampler)
        drop_last = source.drop_last
        options = {
            "collate_fn": source.collate_fn,
            "num_workers": source.num_workers,
            "pin_memory": source.pin_memory,
            "worker_init_fn": source.worker_init_fn,
            "persistent_workers": source.persistent_workers,
            "timeout": source.timeout,
            "prefetch_factor": source.prefetch_factor,
            "multiprocessing_context": source.multiprocessing_context,
        }
    else:
        dataset = source
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"prepare deals out samples by their index; {type(dataset).__name__} has "
            "no length. Give it a map-style dataset (__len__ and __getitem__)"
        )
    if isinstance(source, DataLoader) and not isinstance(
        source.sampler, RandomSampler | SequentialSampler
    ):
        raise ValueError(
            f"the DataLoader has a {type(source.sampler).__name__}, and prepare deals "
            "out the samples itself; give it a DataLoader without, or the dataset "
            "with batch_size=N, or use %%dist_train raw"
        )
    check_count(
        "batch_size", batch_size, "the samples of all ranks together, as batch_size=64"
    )
    assert batch_size is not None
    if accumulate > batch_size:
        raise ValueError(
            f"--accumulate {accumulate}: a batch of {batch_size} cannot be cut into so "
            "many microbatches"
        )
    if not len(dataset):
        raise ValueError("the dataset is empty")
    batches = GlobalBatches(
        len(dataset),
        batch_size,
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=seed,
        accumulate=accumulate,
    )
    collate = options.get("collate_fn", default_collate)
    if type(dataset) is TensorDataset and collate is default_collate:
        # Index the tensors once a batch, not once a sample: the same values.
        options["collate_fn"] = as_list
        batches.as_tensors = True
        return DataLoader(dataset, batch_size=None, sampler=batches, **options), batches
    return DataLoader(dataset, batch_sampler=batches, **options), batches
