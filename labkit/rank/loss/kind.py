"""What a loss is a mean or a sum over, and the note where ranks average it wrongly."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from labkit.compat.c10d import is_in_parts
from labkit.compat.torch import all_gather_with_gradients
from labkit.compat.torch import no_dispatch
from labkit.rank.loss.graph import Factor
from labkit.rank.loss.graph import Term
from labkit.rank.loss.graph import Terms
from labkit.rank.loss.graph import adds_up_to
from labkit.rank.loss.graph import is_normalized

UNEVEN = (
    "the loss is a mean over elements whose number differs between samples or "
    "batches (because of ignore_index, a mask, class weights or lengths), but ranks "
    "are weighted by their number of samples. So the gradient differs from that of "
    "one process on the whole batch. Pass prepare(..., weigh=f), where f(batch) "
    "returns what the mean of that batch divides by, for example weigh=lambda "
    "batch: (batch[1] != -100).sum(). A sum that the loop divides by counts of its "
    "own, over several batches (num_items_in_batch) or for each part of the loss, is "
    'right with reduction="sum" instead, and each count summed over the ranks: '
    "dist.all_reduce(count, group=loader.group)"
)
SUM = (
    "the loss is a sum over samples, but the losses of ranks and microbatches "
    "are averaged: the gradient is a fraction of what one process computes on "
    'the whole batch. Pass prepare(..., reduction="sum"), or use a mean. A loop that '
    "divides the gradient by a number of samples, as in an update by hand, then needs "
    "that of all ranks: size = torch.tensor(len(x)); dist.all_reduce(size, "
    "group=loader.group). Where it divides by len(x) of this rank, without "
    'reduction="sum", the result is right if all ranks have equally many samples'
)
SUM_OUTSIDE = (
    "the loss has a sum over data that the loop does not take from the loader, and the "
    "losses of ranks and microbatches are averaged. Where all ranks compute the same, "
    "that is right as it is. Where each has samples of its own, the gradient is a "
    "fraction of what one process computes on all of them: pass prepare(..., "
    'reduction="sum"), or use a mean'
)
MEAN_IN_SUM = (
    'reduction="sum" adds up the losses of ranks and microbatches, and this loss has a '
    "mean over the samples or targets of one of these, so the gradient is larger than "
    "that of one process on the whole batch. Divide by the number of samples, or "
    "targets, on all ranks together: count = torch.tensor(len(x)); "
    "dist.all_reduce(count, group=loader.group); loss = losses.sum() / count. A loss "
    'that is one mean over the samples needs no reduction="sum"'
)
PARTLY_SUM = (
    "the loss adds a sum over samples to a mean, but the losses of ranks and "
    "microbatches are averaged: the sum has only a fraction of the weight that it has "
    "in one process on the whole batch. Use means for all parts of the loss: divide "
    "the sum by len(inputs)"
)
CONSTANT = (
    "the loss is a sum over samples, divided by a number that is not this rank's "
    "number of samples (a constant batch size, for example). The losses of ranks and "
    "microbatches are averaged, so the gradient is a fraction of what one process "
    "computes on the whole batch. Divide by the number of samples that the loop "
    'gets, len(inputs), or pass prepare(..., reduction="sum")'
)
CURVED_MEAN = (
    "the loss is not a mean over samples, but computed from means or sums over the "
    "batch (a root, a logarithm or a quotient of them, a standard deviation or a "
    "correlation). Each rank and microbatch computes it from its own samples, so the "
    "average differs from the loss of one process on the whole batch. Compute it for "
    "each sample and take the mean of that, or use a loss that is a mean, such as the "
    "MSE instead of its root"
)

NORMALIZED = (
    "the loss uses values, such as advantages, that the loop normalizes to mean 0 and "
    "standard deviation 1 over the samples of this rank and microbatch, where one "
    "process normalizes them over the whole batch. Normalize them before prepare, over "
    "all samples"
)
WEIGHTED = (
    "samples count by weights that the loop normalizes, to a mean or a sum of 1, over "
    "the samples of this rank and microbatch, where one process normalizes them over "
    "the whole batch. Leave them as they are, divide by their sum, as in "
    "(losses * weights).sum() / weights.sum(), and pass prepare(..., weigh=f), where "
    "f(batch) returns that sum, for example weigh=lambda batch: batch[2].sum()"
)
BY_COUNTS = (
    "positive targets count by a pos_weight that the loop computes from the targets of "
    "this rank and microbatch, where one process takes those of the whole batch. "
    "Compute it before prepare, over all samples, or from counts over all ranks: "
    "dist.all_reduce(counts, group=loader.group)"
)
PENALTY_IN_SUM = (
    'reduction="sum" adds up the losses of ranks and microbatches, and with them a '
    "part of the loss that is computed of parameters alone, such as a penalty, which "
    "one process on the whole batch has once. Divide it by the number of ranks, "
    "dist.get_world_size(loader.group), and with --accumulate by that of microbatches; "
    "or use the optimizer's weight_decay"
)
PAIRS = (
    "the loss compares samples with each other, but each rank and microbatch has only "
    "its own samples to compare, so it differs from the loss of one process on the "
    "whole batch. Bring the ranks' embeddings together before comparing them: "
    f"{all_gather_with_gradients()}(embeddings, 0, loader.group). Every rank needs "
    "the same number of samples for that: a batch size that is a multiple of the "
    "number of ranks, drop_last=True, and no --accumulate"
)
SORTED = (
    "the loss puts samples in an order (topk, sort, argsort), for example to take the "
    "hardest ones, but each rank and microbatch has only its own samples to order, and "
    "takes as many of each: it differs from the loss of one process on the whole "
    "batch. Bring the ranks' numbers together before: "
    f"{all_gather_with_gradients()}(losses, 0, loader.group). Every rank needs the "
    "same number of samples for that: a batch size that is a multiple of the number "
    "of ranks, drop_last=True, and no --accumulate"
)
BALANCE = (
    "a part of the loss multiplies mean probabilities by shares of the samples, as the "
    "balance loss of a mixture of experts does (router_aux_loss_coef in transformers). "
    "Each rank and microbatch takes both from its own samples, so this part differs "
    "from that of one process on the whole batch, and balances each of them by itself, "
    "as usual in distributed training. It is that of the whole batch where the shares "
    "are taken over all ranks: dist.all_reduce(counts, group=loader.group), divided by "
    'what they then add up to. With reduction="sum" it counts once for each rank: '
    "divide it by their number"
)

MAX_NUMBER_OF_WEIGHT = 2
"""Samples: a division by as many may be a weight, so that those of a batch with more
decide."""


class LossWatch:
    """Looks at a rank's losses: are the ranks' means averaged as they should be?"""

    def __init__(self, *, is_sum: bool = False) -> None:
        """`is_sum` where they are added up: are they sums?"""
        self._is_sum = is_sum
        self._microbatch = 0
        self._place = 0
        """Losses of this microbatch so far: a loop may have several."""
        self._before: dict[tuple[int, int], tuple[float, float]] = {}
        """By the place of a loss and of a mean in it, what the last mean divided by,
        and that for each sample."""
        self._weights: dict[int, list[torch.Tensor]] = {}
        """By the place of a loss, what mean probabilities in it were multiplied by."""
        self._normalized: dict[int, torch.Tensor] = {}
        """By the place of a loss, weights of its samples with a mean or a sum of 1."""
        self._right: set[int] = set()
        """Places of losses that were as expected, in a batch with more samples."""

    def begin_pass(self) -> None:
        """The loop begins with its data again, which may have grown: images do, and
        sequences."""
        self._before.clear()

    def look(
        self,
        loss: torch.Tensor,
        num_samples: int | None,
        microbatch: int,
        seed: torch.Tensor | None = None,
    ) -> str | None:
        """The note on a loss of this microbatch; None where it is a mean over the
        samples, as expected.

        Without `num_samples`, in a loop over data of its own, sums alone are seen.
        """
        self._place = self._place + 1 if microbatch == self._microbatch else 0
        self._microbatch = microbatch
        # A number in a graph is no tensor to a dispatch mode, as of the step's probe.
        judge = self._judge_sum if self._is_sum else self._judge
        with no_dispatch():
            if seed is not None and is_sum_of(loss, seed):
                return self._of_sums(SUM, num_samples)
            if loss.numel() != 1:
                return None
            if self._is_sum and is_in_parts(loss):
                return None  # of parameters, and counted once as it is
            try:
                text = judge(Terms(num_samples), loss.grad_fn, num_samples)
            except (RuntimeError, TypeError, ArithmeticError):
                return None  # of other kinds of numbers: a check must not end the loop
        if num_samples and num_samples > MAX_NUMBER_OF_WEIGHT:
            if text is None:
                self._right.add(self._place)
        elif text in (SUM, PARTLY_SUM) and self._place in self._right:
            return None
        return self._of_sums(text, num_samples)

    def _of_sums(self, text: str | None, num_samples: int | None) -> str | None:
        """What is said of a sum, where the loop has the loader's data or its own."""
        if text is None or (self._is_sum and text == SUM):
            return None
        return SUM_OUTSIDE if num_samples is None else text

    def _judge_sum(
        self, found: Terms, root: Any, num_samples: int | None
    ) -> str | None:
        """MEAN_IN_SUM where losses that are added up have a mean over samples, and
        not one for each sample, PENALTY_IN_SUM, or BALANCE."""
        if not num_samples:
            return None
        terms = list(found.below(root))
        if any(found.is_of_data(term.node) is False for term in terms):
            return PENALTY_IN_SUM
        if num_samples <= MAX_NUMBER_OF_WEIGHT:
            return None
        if text := self._of_weights(found.weighted(root)):
            return text
        means = [
            term
            for term in terms
            if term.kind == "mean"
            and term.curve is None
            and not term.factors
            and term.count is not None
            and found.is_of_data(term.node)
        ]
        if not means or _is_one_a_sample(means, num_samples):
            return None
        is_over_samples = any(float(m.count or 1) % num_samples == 0 for m in means)
        return MEAN_IN_SUM if is_over_samples or len(means) == 1 else None

    def _judge(self, found: Terms, root: Any, num_samples: int | None) -> str | None:
        terms = list(found.below(root))
        weighted: dict[Any, torch.Tensor] = {}
        if num_samples and num_samples > 1:
            near = found.near(terms)
            if found.has_pairs(near):
                return PAIRS
            # The largest number alone is of no mean or sum.
            if found.sorts_samples(near or found.near([Term(root, "other")])):
                return SORTED
            if found.has_curved(terms) or found.has_products(near):
                return CURVED_MEAN
            if found.weighs_by_counts(near):
                return BY_COUNTS
            weighted = found.weighted(root)
            beside = [each for each in near if each[0] not in weighted]
            if text := self._of_samples(found.weights_of_samples(beside), num_samples):
                return text
        terms = [term for term in terms if term.curve is None and term.kind != "other"]
        if len(terms) > 1:
            terms = [term for term in terms if found.is_of_data(term.node) is not False]
        is_alone = len(terms) == 1
        terms = [
            term
            for term in terms
            if not (term.kind == "sum" and found.is_averaged(term))
            and not found.is_with(term, weighted)
        ]
        groups: dict[Any, list[Term]] = {}
        for number, term in enumerate(terms):
            groups.setdefault(_likeness(term, number, num_samples), []).append(term)
        for place, group in enumerate(groups.values()):
            text = self._judge_group(group, num_samples, place, is_alone=is_alone)
            if not text:
                continue
            over_data = [found.is_of_data(term.node) for term in group]
            if True not in over_data and (not is_alone or over_data == [False]):
                continue
            others = [term for term in terms if term not in group]
            is_part = any(
                term.kind == "mean" and found.is_of_data(term.node) for term in others
            )
            return PARTLY_SUM if text in (SUM, CONSTANT) and is_part else text
        return self._of_weights(weighted)

    def _of_samples(self, weights: list[torch.Tensor], num_samples: int) -> str | None:
        """NORMALIZED or WEIGHTED, by what samples are multiplied by."""
        if any(map(is_normalized, weights)):
            return NORMALIZED
        weights = [each for each in weights if each.numel() == num_samples]
        if any(adds_up_to(each, 1, least=3) for each in weights):
            return WEIGHTED
        # Weights of a few sizes, as those of classes, may happen to have a mean of 1.
        before = self._normalized.pop(self._place, None)
        for each in weights:
            if adds_up_to(each, num_samples) or adds_up_to(each, 1):
                now = self._normalized[self._place] = each.flatten().sort().values
                if before is not None and not torch.equal(now, before):
                    return WEIGHTED
        return None

    def _of_weights(self, weighted: dict[Any, torch.Tensor]) -> str | None:
        """BALANCE where means are weighted by other numbers than in the last batch,
        which are of the samples."""
        before = self._weights.get(self._place, [])
        now = [each.clone() for each in weighted.values()]
        self._weights[self._place] = now
        pairs = zip(before, now, strict=False)
        are_equal = all(torch.equal(one, other) for one, other in pairs)
        return None if are_equal else BALANCE

    def _judge_group(
        self, group: list[Term], num_samples: int | None, place: int, *, is_alone: bool
    ) -> str | None:
        """The note on terms that are alike, if they are over data."""
        term = group[0]
        if term.is_weighted:
            return UNEVEN
        if num_samples and _is_one_a_sample(group, num_samples):
            size = len(group)
            if _has_factor(term, {num_samples}):
                return None
            if _has_factor(term, {size}):
                return self._uneven(place, float(size), num_samples, is_strict=True)
            text = _of_sum(term, (size,), num_samples)
            if text == SUM and _is_one_a_step(group, num_samples):
                return UNEVEN
            return text
        texts = [
            self._judge_term(each, num_samples, (place << 12) + number, is_alone)
            for number, each in enumerate(group)
        ]
        return next(filter(None, texts), None)

    def _judge_term(
        self, term: Term, num_samples: int | None, place: int, is_alone: bool
    ) -> str | None:
        count = term.count
        if term.kind == "sum":
            if term.divisor is None:
                return None
            if text := _of_sum(term, term.sizes or (), num_samples):
                return text
            count = term.divisor
            if num_samples and _has_factor(term, {num_samples}):
                if all(each.is_number for each in term.factors):
                    return None
                count = num_samples  # as of a mask, with another count in other batches
        if count is None or not num_samples:
            return None
        count = float(count)
        is_whole = not term.is_partial or count == prod(term.sizes or ())
        is_strict = is_alone or term.kind == "sum" or not is_whole
        if is_whole and term.kind == "mean" and count and num_samples % count == 0:
            is_strict = False  # as of a part of the batch, with a step of its own
        return self._uneven(place, count, num_samples, is_strict=is_strict)

    def _uneven(
        self, place: int, count: float, num_samples: int, *, is_strict: bool
    ) -> str | None:
        """UNEVEN where a mean over `count` elements is not one over samples.

        Of several terms, one may be over data of its own, always the same number.
        """
        each = count / num_samples
        key = self._place, place
        count_before, each_before = self._before.get(key, (count, each))
        self._before[key] = count, each
        if is_strict:
            is_even = each >= 1 and each.is_integer()  # 0 where all are ignored
            return None if is_even and each == each_before else UNEVEN
        return UNEVEN if count != count_before and each != each_before else None


def is_sum_of(losses: torch.Tensor, seed: torch.Tensor) -> bool:
    """Whether `losses.backward(seed)` differentiates a sum of several losses, each
    with the same weight, which is not their mean."""
    if losses.numel() < 2 or seed.device.type != "cpu":
        return False
    weight = float(seed.flatten()[0])
    return bool((seed == weight).all()) and abs(weight * losses.numel() - 1) > 1e-3


def is_looked_at(microbatch: int, *, is_on_gpu: bool) -> bool:
    """Whether to look at the losses of this microbatch of a run, counted from 1: a look
    takes microseconds, and on a GPU it may wait."""
    return microbatch <= 3 or microbatch % (100 if is_on_gpu else 10) == 0


def _likeness(term: Term, number: int, num_samples: int | None) -> Any:
    """What is the same for the terms that a loop makes, one for each sample."""
    factors = tuple(
        float(each.value) if each.is_number and each.value is not None else number
        for each in term.factors
    )
    return num_samples and (term.node.name(), term.kind, factors)


def _is_one_a_sample(group: list[Term], num_samples: int) -> bool:
    """Whether terms are of one sample each: at least there are as many, and they are
    not means over all samples."""
    if num_samples < 2 or len(group) < num_samples:
        return False
    counts = [prod(term.sizes) if term.sizes else None for term in group]
    if None in counts:
        return False
    if len(group) % num_samples:
        return set(counts) == {1}
    return any((count or 0) % num_samples for count in counts)


def _is_one_a_step(group: list[Term], num_samples: int) -> bool:
    """Whether means may be over the samples that are left at each step, and not over
    the elements of one sample: there are as many of the one as of the other."""
    counts = {float(term.count or 0) for term in group}
    return len(counts) > 1 and max(counts) == num_samples


def _of_sum(term: Term, sizes: tuple[int, ...], num_samples: int | None) -> str | None:
    """The note on a sum over something of this shape."""
    if num_samples and _has_factor(term, {num_samples, prod(sizes), *_counts(sizes)}):
        return None
    divisor = term.divisor
    if divisor is None or not all(each.is_number for each in term.factors):
        return None
    if abs(float(divisor)) <= 2:  # as -0.5 * x.sum()
        return SUM
    if not num_samples or not sizes:
        return None
    is_uneven = not (float(divisor) / num_samples).is_integer()
    is_part = abs(float(divisor)) <= prod(sizes)
    return UNEVEN if is_uneven and is_part else CONSTANT


def _counts(sizes: tuple[int, ...]) -> Iterator[int]:
    """Numbers of samples, or of parts of them, that a sum over this shape is of."""
    counts = {sizes[0]} if sizes else set()
    for size in sizes[1:]:
        counts |= {count * size for count in counts}
    yield from counts


def _has_factor(term: Term, counts: set[int]) -> bool:
    """Whether a division, or all of them, are by one of these numbers."""
    values = [each.value for each in term.factors if not _is_fraction(each)]
    if len(values) > 1:
        values.append(term.divisor)
    return any(
        abs(abs(float(value)) - count) < 1e-4 * count
        for value in values
        if value is not None
        for count in counts
    )


def _is_fraction(factor: Factor) -> bool:
    """Whether it is a weight, as of 0.5 * x.sum(), and none of two samples."""
    value = factor.value
    return factor.is_product and value is not None and abs(float(value)) <= 2
