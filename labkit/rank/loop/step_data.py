"""What a loop has been given since its last step, and what its losses weigh by it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.rank.data.dealing import Dealer
from labkit.rank.data.dealing import Share
from labkit.rank.data.loader import RankLoader
from labkit.rank.loss.batches import is_of_one
from labkit.rank.loss.hooks import LossHooks
from labkit.rank.loss.kind import CONSTANT
from labkit.rank.loss.kind import LossWatch
from labkit.rank.loss.kind import is_looked_at
from labkit.records import LOSS_WEIGHT
from labkit.strategies.options import BatchNorm

DRAWN_BEFORE = (
    "the loop trains with batches that it has drawn before (a list of them, a "
    "prefetcher, or one loss over several), and a backward pass is weighted by the "
    "batch that was drawn last. Ranks' parts of some are unequal, or weigh counts them "
    "differently, so the result is not that of one process. Draw each batch right "
    "before its backward pass, or make all parts equal: drop_last=True, a batch size "
    "that is a multiple of the number of ranks, no weigh and no --accumulate. A sum "
    "that is divided by a count over several batches, such as num_items_in_batch, is "
    'right with reduction="sum" and that count summed over the ranks: '
    "dist.all_reduce(count, group=loader.group)"
)
MAX_WAITING = 100
"""Batches that are remembered until they have their backward pass."""
ZIPPED = (
    "the loop takes batches of two loaders at once, and this rank's parts are not the "
    "same fraction of both, so the mean over the ranks is not that of one process. "
    "Give both a batch size that is a multiple of the number of ranks, and "
    "drop_last=True"
)
OWN_DATA = (
    "the loop does not take its batches from the loader that prepare returned; with "
    "--accumulate {count} it steps once in {count} backward passes, where one process "
    "steps after each. Take them from that loader, which splits each of its batches "
    "into {count}, or have the loop run {count} times as often"
)

ADDED_UP = (
    'reduction="sum" adds up the gradients of the ranks, and the loop does not take '
    "its batches from the loader that prepare returned. Where each rank has samples of "
    "its own, the sum is that of one process on all of them. Where all ranks compute "
    'the same, it is as many times that of one process: leave out reduction="sum"'
)


@dataclass(frozen=True)
class Waiting:
    """A batch that the loop drew another after, before a backward pass with it."""

    weight: float
    stored: frozenset[StorageWeakRef]
    """Where its tensors are; in a graph they may be as views."""

    def is_kept(self, now: frozenset[StorageWeakRef]) -> bool:
        """Whether the loop, or a graph, still has it, and not only what is in the
        batch of `now` as well."""
        return any(not each.expired() for each in self.stored - now)


class StepData:
    """The batches of one run's loop, as its loaders give them."""

    def __init__(
        self, hooks: LossHooks, *, accumulate: int, note: Callable[[str], None]
    ) -> None:
        self.share: Share | None = None
        """What the loop has at the moment; None in one over data of its own."""
        self.weight_outside = 1.0
        """What a backward pass is scaled by in a loop over data of its own."""
        self._hooks = hooks
        self._hooks.check_loss = self._check_loss
        self._loss_watch: LossWatch | None = None
        """Until something that it has found is noted."""
        self._found: str | None = None
        """On a loss whose gradients the next step would take."""
        self._found_zeroed: str | None = None
        """On one whose gradients the loop has set to zero since."""
        self._is_added_up = False
        """Whether losses of several ranks are added up."""
        self._accumulate = accumulate
        self._note = note
        self._loader: RankLoader | None = None
        """Which gave the batch that the loop has."""
        self._is_first_microbatch = True
        """Whether the loop's next one is of another global batch."""
        self._num_unused = 0
        """Batches of this pass less the backward passes in it."""
        self._num_drawn = 0
        """Samples of this pass so far."""
        self._is_uneven = False
        """Whether some batch of this pass is not weighted as one outside of it is."""
        self._is_new = False
        """Whether there was no backward pass with the batch that the loop has."""
        self._waiting: list[Waiting] = []
        """Those of this pass."""
        self._graph: Any = None
        """That a backward pass is about to go through."""
        self._num_samples: int | None = None
        """Of this step so far; None in a loop over data of its own."""
        self._num_tokens = 0
        """Of this step so far; 0 where samples are no sequences of tokens."""
        self._loss_weight: float | None = None
        """Of this step so far; None where losses count by the number of samples."""

    @property
    def is_own(self) -> bool:
        """Whether the loop is over data of its own."""
        return self._num_samples is None

    def weigh_losses(self, dealer: Dealer, *, is_mean_of_samples: bool) -> None:
        """Have backward passes begin with this rank's part of the whole batch's
        loss."""
        self._hooks.weight = self.weight_outside = dealer.weight_outside
        self._hooks.weight_in_parts = 1.0 / dealer.accumulate
        self._hooks.is_sum = dealer.is_sum
        if dealer.peers.size * self._accumulate > 1 and is_mean_of_samples:
            self._loss_watch = LossWatch(is_sum=dealer.is_sum)
        self._is_added_up = dealer.is_sum and dealer.peers.size > 1

    def _check_loss(self, loss: torch.Tensor, seed: torch.Tensor | None) -> None:
        """Note a loss that is not the mean of those of ranks and microbatches."""
        self._graph = loss.grad_fn
        if self._loss_watch is None:
            return
        number = self._hooks.microbatch
        if not is_looked_at(number, is_on_gpu=not loss.is_cpu):
            return
        num_samples = None if self.share is None else self.share.num_samples
        if num_samples == 0:  # a stand-in
            return
        text = self._loss_watch.look(loss, num_samples, number, seed)
        if text is None and self.share is None and self._num_unused > 0:
            # As of all batches of a pass, added up: divided by how many samples?
            found = self._loss_watch.look(loss, self._num_drawn, number, seed)
            text = found if found == CONSTANT else None
        if text is not None:
            self._found = self._found or text
            if self.share is None:
                self._note_loss(text)

    def _note_loss(self, text: str | None) -> None:
        if text is not None and self._loss_watch is not None:
            self._note(text)
            self._loss_watch = None
        self._found = self._found_zeroed = None

    def take_gradients(self) -> None:
        """A step of an optimizer of `prepare` has taken them."""
        self._note_loss(self._found)

    def zero_gradients(self) -> None:
        """The loop has set them to zero: without a step, as of an attack on the model,
        or after an update by hand, and it goes on with the next batch."""
        self._found_zeroed, self._found = self._found_zeroed or self._found, None

    def begin_epoch(self) -> None:
        if self._loss_watch is not None:
            self._loss_watch.begin_pass()
        self._num_unused, self._num_drawn, self._is_uneven = 0, 0, False
        self._is_first_microbatch = True
        self._is_new, self._waiting = False, []

    def ask(self, loader: RankLoader) -> None:
        """The loop asks a loader for a batch."""
        self._note_loss(self._found or self._found_zeroed)
        self._num_samples = self._num_samples or 0
        if self._is_new and loader is self._loader and self.share is not None:
            stored = loader.given
            self._waiting = [each for each in self._waiting if each.is_kept(stored)]
            self._waiting.append(Waiting(self.share.weight, stored))
            del self._waiting[:-MAX_WAITING]

    def give(self, share: Share, loader: RankLoader) -> None:
        """It gets this rank's part of it, or of a microbatch."""
        assert self._num_samples is not None
        is_zipped = self.share is not None and loader is not self._loader
        if is_zipped and share.weight != self._hooks.weight:
            self._note(ZIPPED)
        self._loader = loader
        self._is_new = True
        self._hooks.begin_microbatch(is_first=self._is_first_microbatch)
        self._is_first_microbatch = share.is_last  # is the next one
        self._num_samples += share.num_samples
        self._num_drawn += share.num_samples
        self._num_tokens += share.num_tokens
        self._num_unused += 1
        self._is_uneven |= share.weight != self.weight_outside
        self._hooks.weight = share.weight
        self._hooks.is_sum = share.is_sum
        self.share = share
        if share.loss_weight is not None:
            self._loss_weight = (self._loss_weight or 0.0) + share.loss_weight
        counts_here = share.num_samples > 0
        if BatchNorm.counts_here is not counts_here:  # to set it costs what reads it
            BatchNorm.counts_here = counts_here

    def begin_backward(self, *, is_prepared: bool) -> None:
        """A backward pass begins; `is_prepared` where the run has a model."""
        graph, self._graph = self._graph, None
        if self.share is not None:
            self._num_unused -= 1
            if not (self._waiting and self._uses_waiting(graph)):
                self._is_new = False
        elif self._is_uneven and self._num_unused > 0:
            self._note(DRAWN_BEFORE)
        elif is_prepared and self.is_own and self._is_added_up:
            self._note(ADDED_UP)
        elif is_prepared and self._accumulate > 1:
            self._note(OWN_DATA.format(count=self._accumulate))

    def _uses_waiting(self, graph: Any) -> bool:
        """Whether a backward pass may be with a batch before the last one: noted where
        that counts otherwise. A loop that skips a batch no longer has it; of one that
        keeps it, the graph may tell."""
        assert self._loader is not None
        now = self._loader.given
        kept = [each for each in self._waiting if each.is_kept(now)]
        if any(each.weight != self._hooks.weight for each in kept):
            before = frozenset().union(*(each.stored for each in kept)) - now
            if is_of_one(graph, now, before):
                return False
            self._note(DRAWN_BEFORE)
        self._waiting = kept[1:]
        return bool(kept)

    def take_counts(self) -> dict[str, float]:
        """Those of the step that is taken, by the name of their record."""
        counts: dict[str, float] = {}
        if self._num_samples is not None:
            counts["samples"] = self._num_samples
            self._num_samples = 0
        if self._num_tokens:
            counts["tokens"] = self._num_tokens
            self._num_tokens = 0
        if self._loss_weight is not None:
            counts[LOSS_WEIGHT] = self._loss_weight
            self._loss_weight = None
        return counts

    def end_epoch(self) -> None:
        """The loader has no more."""
        self._num_samples = self._loss_weight = self.share = self._loader = None
        self._num_tokens = 0
        BatchNorm.counts_here = True
        self._hooks.weight = self.weight_outside
