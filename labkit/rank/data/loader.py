"""Yields this rank's part of every global batch, on its device."""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

from labkit.checks import UnsupportedLoopError
from labkit.checks import short_repr
from labkit.rank.data.dealing import GlobalBatches
from labkit.rank.data.dealing import Share
from labkit.rank.data.dealing import Stream
from labkit.rank.data.devices import tensors_in
from labkit.rank.data.devices import to_device
from labkit.rank.data.sharing import AsGiven
from labkit.rank.data.sharing import ShareLoader
from labkit.strategies.mesh.worlds import LOADER

Weigh = Callable[[Any], float | torch.Tensor]

_END = object()
DRAWN_BY_A_THREAD = (
    "a thread of the loop's own draws the batches of the loader that prepare returned, "
    "to load ahead or to train there, and ranks draw and weight batches in step with "
    "the cell. Iterate over the loader in the cell itself, without a thread; to load "
    "batches ahead, give prepare a DataLoader with num_workers"
)

TWICE_AT_ONCE = (
    "the loop goes through the loader twice at the same time, as zip(loader, loader) "
    "does. Each pass has every sample once, but what a sampler or a generator draws "
    "for the two is in another order than in one process"
)
LOADED_AHEAD = (
    "the loop goes through the loader twice at the same time, as zip(loader, loader) "
    "does, and workers load ahead for one pass alone; give prepare a DataLoader "
    "without num_workers"
)


@dataclass(frozen=True)
class LoaderPosition:
    """The position of a loop in its loader, on any number of ranks."""

    epoch: int
    """The number of its pass, counted from 1."""
    batch: int = 0
    """Global batches of that pass that it has had."""
    fingerprint: int = 0
    """Of the samples in these: see `labkit.rank.data.orders.Order`."""


class RankLoader(AsGiven):
    """Yields this rank's part of every global batch, on its device.

    `on_epoch(epoch)` is called before each pass, counted from 1, and `on_end()` after
    it; `before_batch(loader)` when the loop asks for its next batch, or for one too
    many, and so has ended its work on the last; `on_batch(share, loader)` before it is
    handed out; `on_drawn(drawn, dealt, epoch)` after a whole pass, with the samples
    that this rank had and those of all ranks together. They are called with the loader
    so that they need not hold it: one that a cell drops is freed at once, with its
    workers, and not as a part of a cycle, where these are waited for in vain.

    With a position in `resume_at` the passes before it yield nothing, and its own
    begins after the batches that it had.

    With `weigh` a rank's mean loss counts by what that gives for its batch, and not by
    the number of its samples.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: GlobalBatches | Stream,
        device: torch.device,
        *,
        on_epoch: Callable[[int], None],
        on_batch: Callable[[Share, "RankLoader"], None],
        on_end: Callable[[], None],
        before_batch: Callable[["RankLoader"], None] = lambda loader: None,
        on_drawn: Callable[[np.ndarray, np.ndarray, int], None] = lambda *drawn: None,
        weigh: Weigh | None = None,
    ) -> None:
        self.loader = loader
        self.source = loader if batches.source is None else batches.source
        self.batches = batches
        self.device = device
        self.resume_at = LoaderPosition(1)
        self._on_epoch = on_epoch
        self._before_batch = before_batch
        self._on_batch = on_batch
        self._on_end = on_end
        self.before_evaluation: Callable[[], None] = lambda: None
        """Called before each pass through a share of another dataset."""
        self.on_evaluated: Callable[[], None] = lambda: None
        """Called after each pass through a share of another dataset."""
        self.while_shared: Callable[[], AbstractContextManager[None]]
        self.while_shared = contextlib.nullcontext
        """Entered as long as the loop has a batch of such a share."""
        self.refuse: Callable[[UnsupportedLoopError], None] = lambda refusal: None
        """Called in a thread of the cell's, to end the cell with this error."""
        self.count_steps: Callable[[], int] = lambda: 0
        """Gives `steps_taken`."""
        self.on_twice: Callable[[], None] = lambda: None
        """Called where the loop goes on with a pass, and has begun another one."""
        self._is_twice = False
        """Whether it does, since the last pass began."""
        self._on_drawn = on_drawn
        self._weigh = weigh
        self.num_epochs = 0
        """Passes that have begun."""
        self.num_empty = 0
        """Those that have ended without a batch."""
        self.was_measured = False
        """Whether the loop has asked for its length."""
        self._given: Any = None
        """The batch that the loop had last, until it asks for its next one; on a GPU
        only where it is: a loop that drops it early frees its memory."""
        self._at: tuple[int, int, int] | None = None
        """The position in a pass, once the loop has worked on its last batch;
        None between two passes."""

    def __len__(self) -> int:
        self.was_measured = True
        return len(self.batches)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch: what a learning-rate schedule counts. `len` is
        what the loop goes through, K microbatches a step with `--accumulate K`."""
        return len(self.batches) // self.batches.dealer.accumulate

    @property
    def steps_taken(self) -> int:
        """Optimizer steps that the run has taken, with those before it was resumed: at
        which a loop that counts its own begins."""
        return self.count_steps()

    @property
    def given(self) -> frozenset[StorageWeakRef]:
        """Where the batch is that the loop had last."""
        found = self._given
        return found if isinstance(found, frozenset) else storages_of(found)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that share its batches: a sum over it has each
        sample once, also under a strategy by which several ranks have the same samples:
        `dist.all_reduce(size, group=loader.group)`."""
        peers = self.batches.dealer.peers
        peers.check(LOADER)
        return peers.exact_group

    @property
    def position(self) -> LoaderPosition:
        """The position of its loop, between two optimizer steps; between two passes
        that at which the next one begins."""
        if self._at is None:
            epoch = self.num_epochs + 1
            return (
                self.resume_at
                if epoch == self.resume_at.epoch
                else LoaderPosition(epoch)
            )
        return LoaderPosition(*self._at)

    def share(
        self, dataset: Dataset[Any] | DataLoader[Any], *, batch_size: int | None = None
    ) -> ShareLoader:
        """Divide another dataset among the ranks, for an evaluation on all of them.

        Every sample is on one rank, in the order of the dataset: rank 0 has the first
        ones. Every rank gets the same number of batches, so that a model under any
        strategy can be called on them. Sums over them, added up with
        `dist.all_reduce` over `loader.group`, are those over the dataset. Its batches
        are others than those of one process, so a loop that trains on them gets a note.

        Parameters
        ----------
        dataset : Dataset or DataLoader
            Map-style. A DataLoader, in order, keeps its batch size, `collate_fn` and
            workers.
        batch_size : int, optional
            Samples of a batch on all ranks together. Left out only where a DataLoader
            has one.

        Returns
        -------
        ShareLoader
            Yields this rank's batches, on its device.

        Raises
        ------
        ValueError
            As UnsupportedLoopError for data that has no order or no length, or fewer
            samples than ranks.

        Examples
        --------
        >>> correct = torch.zeros((), device=device)
        >>> with torch.no_grad():
        ...     for x, y in loader.share(test_set, batch_size=256):
        ...         correct += (model(x).argmax(1) == y).sum()
        >>> dist.all_reduce(correct, group=loader.group)
        """
        peers = self.batches.dealer.peers
        peers.check(LOADER)
        return ShareLoader(
            dataset,
            batch_size,
            peers,
            self.before_evaluation,
            self.on_evaluated,
            self.while_shared,
        )

    def __iter__(self) -> Iterator[Any]:
        if not is_in_main_thread():
            self.refuse(UnsupportedLoopError(DRAWN_BY_A_THREAD))
            return
        self.batches.dealer.peers.check(LOADER)
        self.check_batches()
        self.batches.epoch = self.num_epochs
        self.num_epochs += 1
        epoch, self._is_twice = self.num_epochs, False
        had = self._batches_had()
        self._on_epoch(self.num_epochs)
        if had is None:
            self.batches.skip_pass()
            self.num_empty += 1
            self._on_end()
            return
        self.batches.first = had
        fingerprint = self.resume_at.fingerprint if had else 0
        self._at = self.num_epochs, had, fingerprint
        dealt = self.batches.deal(self.loader)
        if self._weigh is not None:
            dealt = self._weighed(dealt, self._weigh)
        try:
            for number in itertools.count():
                self.batches.dealer.peers.check(LOADER)  # also in the midst of a pass
                if epoch != self.num_epochs:
                    self._check_twice()
                self._before_batch(self)
                self._given = None
                batch, share = next(dealt, (_END, None))
                if number == 0 and had:
                    self._check_resumed()
                if share is None:
                    self.num_empty += number == 0
                    break
                if length := tokens_of_sample(batch):
                    num_tokens = share.num_samples * length
                    share = dataclasses.replace(share, num_tokens=num_tokens)
                self._advance(share)
                self._on_batch(share, self)
                handed_out = [to_device(batch, self.device)]
                self._given = batch
                if self.device.type != "cpu":
                    self._given = storages_of(handed_out[0])
                del batch  # which may be there already
                yield handed_out.pop()
            if not had and self.batches.dealt and not self._is_twice:
                drawn = np.concatenate(self.batches.drawn)
                self._on_drawn(
                    drawn, np.concatenate(self.batches.dealt), self.num_epochs
                )
        finally:
            self._at = self._given = None
            self._on_end()

    def _check_twice(self) -> None:
        if self.loader.num_workers:
            raise UnsupportedLoopError(LOADED_AHEAD)
        self._is_twice = True
        self.on_twice()

    def _advance(self, share: Share) -> None:
        """Count a global batch where this is the last of its microbatches."""
        if self._at is None:
            raise UnsupportedLoopError(
                "the loop over the loader starts a second pass over it, for example "
                "by next(iter(loader)), before the first one ends; take other batches "
                "from a loader of their own: loader.share(dataset, batch_size=B)"
            )
        if share.is_last:
            epoch, batch, _ = self._at
            self._at = epoch, batch + 1, share.fingerprint

    def _batches_had(self) -> int | None:
        """Global batches of this pass that were had before; None if it was over."""
        if self.num_epochs < self.resume_at.epoch:
            return None
        return self.resume_at.batch if self.num_epochs == self.resume_at.epoch else 0

    def _check_resumed(self) -> None:
        if self.batches.first_fingerprint != self.resume_at.fingerprint:
            raise UnsupportedLoopError(
                f"--resume: epoch {self.num_epochs} does not begin with the samples "
                "that it had before the checkpoint, so the run cannot resume from "
                "there; seed the sampler or the stream the same way in every run, or "
                "leave out --resume and call load_checkpoint"
            )

    def _weighed(
        self, dealt: Iterator[tuple[Any, Share]], weigh: Weigh
    ) -> Iterator[tuple[Any, Share]]:
        """Each step's microbatches, fetched at once and weighted by what they count.
        Collective."""
        dealer = self.batches.dealer
        while step := list(itertools.islice(dealt, dealer.accumulate)):
            counts = [
                count_of(weigh, batch) if share.num_samples else 0.0
                for batch, share in step
            ]
            total = dealer.peers.sum_apart(sum(counts)) or 1.0
            for count in counts:
                weight = count * dealer.peers.size / total
                share = step[0][1]
                share = dataclasses.replace(share, weight=weight, loss_weight=weight)
                yield step.pop(0)[0], share  # one that is had may be dropped


def is_in_main_thread() -> bool:
    """Whether the cell's own code runs, and no thread that draws ahead for it."""
    return threading.current_thread() is threading.main_thread()


def storages_of(batch: Any) -> frozenset[StorageWeakRef]:
    """Where the tensors of a batch are."""
    return frozenset(
        StorageWeakRef(tensor.untyped_storage())
        for tensor in tensors_in(batch)
        if tensor.layout is torch.strided
    )


def count_of(weigh: Weigh, batch: Any) -> float:
    """What a batch counts for, by the user's own function."""
    found = weigh(batch)
    try:
        count = float(found)
        is_count = 0 <= count < float("inf")
    except (TypeError, ValueError, RuntimeError):
        is_count = False
    if not is_count:
        raise ValueError(
            f"weigh returned {short_repr(found)} for a batch; it must return what the "
            "mean loss of the batch divides by, a number that is 0 or more, for "
            "example (batch[1] != -100).sum()"
        )
    return count


def tokens_of_sample(batch: Any) -> int:
    """T of a batch whose first tensor holds integers, (batch, T); otherwise 0."""
    first = batch
    if isinstance(batch, list | tuple):
        first = batch[0] if batch else batch
    elif isinstance(batch, Mapping):
        first = next(iter(batch.values()), None)
    if isinstance(first, torch.Tensor) and first.ndim == 2:
        is_token = not (first.is_floating_point() or first.is_complex())
        return first.shape[1] if is_token and first.dtype != torch.bool else 0
    return 0
