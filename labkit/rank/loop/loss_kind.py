"""What a loss is a mean or a sum over, as its autograd graph says."""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from math import prod
from typing import Any

import torch

from labkit.compat.torch import no_dispatch
from labkit.compat.torch import outputs_of
from labkit.compat.torch import saved_number
from labkit.compat.torch import saved_value

MAX_NODES = 4096
"""Of a graph, from the loss down to its means and sums, that are looked at: few, but
where a loop adds up the losses of its samples."""
MAX_NODES_BELOW = 128
"""That are looked at to know whether a mean or sum is over data or parameters."""
MAX_NODES_BESIDE = 48
"""Below a mean over samples, that are looked at for statistics of the batch."""
MAX_NODES_OF_LOOK = 1024
"""Of all such searches in one look at a loss."""

ADDED = ("Add", "Sub", "Rsub", "Stack", "Cat")
"""Operations that are linear in all their inputs."""
PASSED = (
    "Neg",
    "Squeeze",
    "Unsqueeze",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Permute",
    "Transpose",
    "T",
    "Expand",
    "ToCopy",
    "Clone",
    "Alias",
    "Pre",  # DeepSpeed's PreBackwardFunctionForModule, on what a module returns
)
"""Operations that leave it as it is."""
CURVED = (
    "Sqrt",
    "Rsqrt",
    "Reciprocal",
    "Log",
    "Log1P",
    "Log2",
    "Log10",
    "Exp",
    "Expm1",
    "Pow",
    "Tanh",
    "Sigmoid",
    "Softplus",
    "LogSigmoid",
)
"""Functions of one number: that of a mean is not the mean of the functions."""
BENT = ("Abs", "Relu", "Clamp", "ClampMin", "ClampMax")
"""Functions that leave alone the numbers on one side."""
EXTREMES = ("Max", "Min", "Median", "Amax", "Amin")
STATISTICS = (
    *EXTREMES,
    "Std",
    "StdMean",
    "Var",
    "VarMean",
    "Norm",
    "LinalgVectorNorm",
    "Logsumexp",
    "Prod",
)
"""What makes one number of many, and is no mean or sum."""
DOTS = ("Dot", "Vdot", "Mm", "Mv", "Bmm", "Trace")
"""Of vectors they are the sum of the products of their elements."""
LAYERS = (
    "Addmm",
    "Linear",
    "Convolution",
    "Embedding",
    "EmbeddingBag",
    "Index",
    "NativeLayerNorm",
    "NativeBatchNorm",
    "NativeGroupNorm",
    "Relu",
    "Gelu",
    "Silu",
    "NllLoss",
    "NllLoss2D",
)
"""What has to do with data, and is not seen in penalties on parameters."""

Value = float | torch.Tensor

UNEVEN = (
    "the loss is a mean over elements whose number differs between samples or "
    "batches (because of ignore_index, a mask, class weights or lengths), but ranks "
    "are weighted by their number of samples. So the gradient differs from that of "
    "one process on the whole batch. Pass prepare(..., weigh=f), where f(batch) "
    "returns what the mean of that batch divides by, for example weigh=lambda "
    "batch: (batch[1] != -100).sum()"
)
SUM = (
    "the loss is a sum over samples, but the losses of ranks and microbatches "
    "are averaged: the gradient is a fraction of what one process computes on "
    'the whole batch. Pass prepare(..., reduction="sum"), or use a mean'
)
PARTLY_SUM = (
    "the loss adds a sum over samples to a mean, but the losses of ranks and "
    "microbatches are averaged: the sum has only a fraction of the weight that it has "
    "in one process on the whole batch. Use means for all parts of the loss: divide "
    "the sum by len(inputs)"
)
CONSTANT = (
    "the loss is a sum over samples, divided by another number than that of this "
    "rank's samples (a constant batch size, for example). The losses of ranks and "
    "microbatches are averaged, so the gradient is a fraction of what one process "
    "computes on the whole batch. Divide by the number of samples that the loop "
    'gets, len(inputs), or pass prepare(..., reduction="sum")'
)
CURVED_MEAN = (
    "the loss is not a mean over samples, but computed from means or sums over the "
    "batch (a root, a logarithm or a quotient of them, or a standard deviation). Each "
    "rank and microbatch computes it from its own samples, so the average differs "
    "from the loss of one process on the whole batch. Compute it for each sample and "
    "take the mean of that, or use a loss that is a mean, such as the MSE instead of "
    "its root"
)

NORMALIZED = (
    "the loss uses values, such as advantages, that the loop normalizes to mean 0 and "
    "standard deviation 1 over the samples of this rank and microbatch, where one "
    "process normalizes them over the whole batch. Normalize them before prepare, over "
    "all samples"
)


@dataclass(frozen=True)
class Factor:
    """What a sum is divided by."""

    value: Value | None
    """None where the graph does not say it."""
    is_number: bool = False
    """Whether it is a number of Python's, which the graph does not compute."""
    is_product: bool = False
    """Whether it is the inverse of what the sum is multiplied by."""


@dataclass(frozen=True)
class Term:
    """A mean or sum of many numbers, one of those that a loss is made of."""

    node: Any
    kind: str
    """ "mean", "sum", or "other" for a statistic."""
    sizes: tuple[int, ...] | None = None
    """The shape of what it is over; None where the graph does not say it."""
    count: Value | None = None
    """What a mean divides by."""
    factors: tuple[Factor, ...] = ()
    is_weighted: bool = False
    """Whether classes count differently."""
    is_partial: bool = False
    """Whether it may be over a part of the elements."""
    curve: Any = None
    """The operation that makes the loss a function of it that is not linear."""

    @property
    def divisor(self) -> Value | None:
        """The product of its factors; None where the graph does not say it."""
        values = [each.value for each in self.factors]
        known = [value for value in values if value is not None]
        return prod(known, start=1.0) if len(known) == len(values) else None


class LossWatch:
    """Looks at a rank's losses: are the ranks' means averaged as they should be?"""

    def __init__(self) -> None:
        self._microbatch = 0
        self._place = 0
        """Losses of this microbatch so far: a loop may have several."""
        self._before: dict[tuple[int, int], tuple[float, float]] = {}
        """By the place of a loss and of a mean in it, what the last mean divided by,
        and that for each sample."""

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
        with no_dispatch():
            if seed is not None and is_sum_of(loss, seed):
                return SUM
            if loss.numel() != 1:
                return None
            try:
                return self._judge(Terms(num_samples), loss.grad_fn, num_samples)
            except (RuntimeError, TypeError):
                return None  # of other kinds of numbers: a check must not end the loop

    def _judge(self, found: "Terms", root: Any, num_samples: int | None) -> str | None:
        terms = list(found.below(root))
        if num_samples and num_samples > 1 and found.has_curved(terms):
            return CURVED_MEAN
        if num_samples and num_samples > 1 and found.has_normalized(terms):
            return NORMALIZED
        terms = [term for term in terms if term.curve is None and term.kind != "other"]
        if len(terms) > 1:
            terms = [term for term in terms if found.is_of_data(term.node) is not False]
        is_alone = len(terms) == 1
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
        return None

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
            return _of_sum(term, (size,), num_samples)
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
            if num_samples and _has_factor(term, {num_samples}):
                return None
            count = term.divisor
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
            return None if each.is_integer() and each == each_before else UNEVEN
        return UNEVEN if count != count_before and each != each_before else None


class Terms:
    """What a loss is made of: found in its graph, from the loss down."""

    def __init__(self, num_samples: int | None) -> None:
        self._num_samples = num_samples
        self._left = MAX_NODES
        self._left_below = MAX_NODES_OF_LOOK
        self._is_of_data: dict[Any, bool | None] = {}

    def below(
        self, root: Any, factors: tuple[Factor, ...] = (), curve: Any = None
    ) -> Iterator[Term]:
        """The means and sums of a loss; those of parameters, too."""
        waiting = [(root, 0, factors, curve)]
        while waiting and self._left:
            self._left -= 1
            node, output, factors, curve = waiting.pop()
            if node is None:
                continue
            kind = kind_of(node)
            term = _term(node, kind)
            if term is not None and self._is_of_one(term):
                waiting.append((*node.next_functions[0], factors, curve))
                continue
            if term is not None:
                found = replace(term, factors=term.factors + factors, curve=curve)
                yield from self._within(found) or [found]
                continue
            if kind in DOTS:
                sizes = _sizes_of_dot(node, output)
                if sizes and self._has_samples(sizes):
                    yield Term(node, "sum", sizes, factors=factors, curve=curve)
                elif sizes:
                    by = (Factor(None), *factors)
                    waiting += [(*each, by, curve) for each in node.next_functions]
                continue
            shape = _shape(node, output)
            if self._has_samples(shape) and kind not in ("Stack", "Cat"):
                continue
            inputs = node.next_functions
            if kind in ADDED or kind in PASSED:
                waiting += [(*each, factors, curve) for each in reversed(inputs)]
            elif kind in ("Mul", "Div"):
                waiting += self._factored(node, kind, factors, curve)
            elif kind in CURVED or (kind in BENT and _is_bent(node, kind)):
                waiting.append((*inputs[0], factors, curve or node))
            elif kind in BENT:
                waiting.append((*inputs[0], factors, curve))

    def has_curved(self, terms: list[Term]) -> bool:
        """Whether a loss is no linear function of means over the samples."""
        number = self._num_samples or 0
        curved = [term for term in terms if term.curve is not None]
        curved += [
            replace(term, curve=term.node)
            for term in terms
            if term.kind == "other" and term.curve is None
        ]
        # As many as samples: of each sample one.
        if curved and len({term.curve for term in curved}) % number:
            return any(self._is_over_batch(term) for term in curved)
        if len(terms) > MAX_NODES_BESIDE:
            return False
        beside = [each for term in terms for each in self._beside(term)]
        return bool(beside) and bool(len(beside) % number)

    def has_normalized(self, terms: list[Term]) -> bool:
        """Whether samples count by numbers that the loop has normalized over them."""
        if len(terms) > MAX_NODES_BESIDE:
            return False
        for term in terms:
            waiting: list[Any] = [term.node]
            seen: set[Any] = set()
            while waiting and len(seen) < MAX_NODES_BESIDE:
                node = waiting.pop(0)
                if node in seen or node is None:
                    continue
                seen.add(node)
                inputs = [each for each, _ in node.next_functions]
                waiting += inputs
                if kind_of(node) == "Mul" and None in inputs:
                    given = saved_value(node, "self" if inputs[0] is None else "other")
                    if isinstance(given, torch.Tensor) and (
                        given.numel() == self._num_samples and _is_normalized(given)
                    ):
                        return True
        return False

    def is_of_data(self, node: Any) -> bool | None:
        """Whether what `node` computes has to do with data, or with parameters alone;
        None where that is not found."""
        if node not in self._is_of_data:
            self._is_of_data[node] = self._search(node)
        return self._is_of_data[node]

    def _search(self, node: Any) -> bool | None:
        waiting, seen = [(node, 0)], set()
        while waiting:
            node, output = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if len(seen) > MAX_NODES_BELOW or self._left_below <= 0:
                return None
            variable = getattr(node, "variable", None)
            if variable is not None:
                if isinstance(variable, torch.nn.Parameter):
                    continue
                if variable.ndim > 1 and self._has_samples(tuple(variable.shape)):
                    return True
                continue
            if kind_of(node) in LAYERS:
                return True
            self._left_below -= 1
            inputs = [each for each in node.next_functions if each[0] is not None]
            if len(inputs) < len(node.next_functions):
                # Not with a constant that is a number, or as large as a parameter.
                mine = prod(_shape(node, output) or ())
                if all(prod(_shape(*each) or ()) != mine for each in inputs):
                    return True
            waiting += inputs
        return False

    def _within(self, term: Term) -> list[Term]:
        """What a mean or sum is made of that is not over samples, but over classes or
        a list of losses."""
        [(node, output)] = term.node.next_functions[:1] or [(None, 0)]
        if kind_of(term.node) not in ("Mean", "Sum") or self._num_samples is None:
            return []
        shape = _shape(node, output)
        is_list = node is not None and kind_of(node) == "Stack"
        if not shape or (self._has_samples(shape) and not is_list):
            return []
        by = (Factor(term.count, True),) if term.kind == "mean" else ()
        found = list(self.below(node, by + term.factors, term.curve))
        return found if all(self._is_term_of_batch(each) for each in found) else []

    def _is_of_one(self, term: Term) -> bool:
        """Whether it is the mean or sum of one number, which is that number."""
        is_plain = kind_of(term.node) in ("Mean", "Sum") and term.sizes is not None
        is_sample = self._num_samples in (None, 1) and term.sizes != ()
        return is_plain and prod(term.sizes or ()) == 1 and not is_sample

    def _is_term_of_batch(self, term: Term) -> bool:
        return (
            term.sizes is None or self._has_samples(term.sizes) or term.kind == "mean"
        )

    def _factored(
        self, node: Any, kind: str, factors: tuple[Factor, ...], curve: Any
    ) -> list[tuple[Any, int, tuple[Factor, ...], Any]]:
        """Where to continue at a product or quotient."""
        (one, other) = (*node.next_functions, (None, 0))[:2]
        if one[0] is None or other[0] is None:
            factor = _constant(node, is_second=other[0] is None)
            if kind == "Mul" and factor.value is not None:
                factor = replace(factor, value=1 / factor.value, is_product=True)
            if kind == "Div" and one[0] is None:
                return [(*other, factors, curve or node)]
            return [(*(one if other[0] is None else other), (factor, *factors), curve)]
        unknown = (Factor(None), *factors)
        by_one, by_other = self.is_of_data(one[0]), self.is_of_data(other[0])
        if by_one and by_other:
            return [(*each, unknown, curve or node) for each in (one, other)]
        if kind == "Div" and by_other:
            return [(*other, unknown, curve or node)]
        return [
            (*each, unknown, curve)
            for each, is_ours in ((one, by_one), (other, by_other and kind == "Mul"))
            if is_ours
        ]

    def _beside(self, term: Term) -> list[Any]:
        """Statistics of the batch that the numbers of the samples are made with. Not
        the largest, which is taken off so that exponentials do not overflow."""
        waiting = [each for each in term.node.next_functions if each[0] is not None]
        seen: set[Any] = set()
        found = []
        while waiting and len(seen) < MAX_NODES_BESIDE:
            node, output = waiting.pop(0)
            if node in seen:
                continue
            seen.add(node)
            shape = _shape(node, output)
            if self._has_samples(shape):
                waiting += [each for each in node.next_functions if each[0] is not None]
                continue
            below = _term(node, kind_of(node))
            if kind_of(node) in EXTREMES:
                continue
            if below is None:
                if prod(shape or ()) == 1 and kind_of(node) in (
                    *ADDED,
                    *CURVED,
                    *PASSED,
                ):
                    waiting += [e for e in node.next_functions if e[0] is not None]
            elif self._is_over_batch(below) and _begins_with(below, self._num_samples):
                found.append(node)
        return found

    def _is_over_batch(self, term: Term) -> bool:
        sizes = term.sizes
        if sizes is not None and prod(sizes) < 2:
            return False
        return self.is_of_data(term.node) is True

    def _has_samples(self, shape: tuple[int, ...] | None) -> bool:
        """Whether something of this shape may hold a number for each sample."""
        if not shape or prod(shape) < 2:
            return False
        return not self._num_samples or prod(shape) % self._num_samples == 0


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


def kind_of(node: Any) -> str:
    """The name of an operation: "Mul" of "MulBackward0"."""
    return str(node.name()).partition("Backward")[0]


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


def _is_normalized(given: torch.Tensor) -> bool:
    """Whether numbers have mean 0 and standard deviation 1, and are no signs."""
    if not given.is_floating_point():
        return False
    given = given.detach().double()
    if abs(float(given.mean())) > 1e-4 or len(given.abs().unique()) == 1:
        return False
    return any(abs(float(given.std(correction=each)) - 1) < 1e-3 for each in (0, 1))


def _begins_with(term: Term, num_samples: int | None) -> bool:
    """Whether it is over something that has samples as its first dimension."""
    return bool(term.sizes and num_samples and term.sizes[0] % num_samples == 0)


def _term(node: Any, kind: str) -> Term | None:
    """What an operation makes of many numbers; None where it does something else."""
    if kind in ("Mean", "Sum", *STATISTICS):
        return _reduction(node, kind)
    reduction = saved_number(node, "reduction")
    if reduction not in (1, 2):
        return None
    name = "mean" if reduction == 1 else "sum"
    target = saved_value(node, "target")
    sizes = None if target is None else tuple(target.shape) or (1,)
    if not kind.startswith("NllLoss"):
        count = prod(sizes) if sizes and reduction == 1 else None
        return Term(node, name, sizes, count)
    total = saved_value(node, "total_weight") if reduction == 1 else None
    if total is not None and sizes and total.dtype in (torch.float16, torch.bfloat16):
        # It is rounded, to infinity where it is large.
        whole = float(prod(sizes))
        total = whole if total == torch.tensor(whole).to(total.dtype) else total
    is_weighted = reduction == 1 and saved_value(node, "weight") is not None
    return Term(node, name, sizes, total, is_weighted=is_weighted, is_partial=True)


def _reduction(node: Any, kind: str) -> Term | None:
    """A mean, sum or statistic over all elements, or over the first dimension."""
    sizes = saved_number(node, "self_sym_sizes")
    if sizes is None:
        inner = _shape(*node.next_functions[0])
        sizes = () if inner is None else inner
    sizes = tuple(sizes)
    dim = saved_number(node, "dim")
    if dim is not None and not isinstance(dim, tuple):
        dim = (dim,)
    if dim:
        rank = len(sizes)
        dims = {each - 2**64 + rank if each >= 2**63 else each % rank for each in dim}
        if 0 not in dims:
            return None
        sizes = tuple(size for at, size in enumerate(sizes) if at in dims)
    if kind == "Mean":
        return Term(node, "mean", sizes, prod(sizes))
    power = saved_number(node, "ord")
    power = saved_number(node, "p") if power is None else power
    return Term(node, "sum" if kind == "Sum" or power == 1 else "other", sizes)


def _sizes_of_dot(node: Any, output: int) -> tuple[int, ...] | None:
    """The shape of what a product of vectors or matrices sums up to one number; None
    where it gives more than one."""
    if prod(_shape(node, output) or ()) != 1:
        return None
    shapes = [_shape(*each) for each in node.next_functions]
    sizes = max((s for s in shapes if s is not None), key=prod, default=())
    if kind_of(node) == "Trace":
        sizes = sizes[:1]
    return tuple(size for size in sizes if size != 1) or None


def _is_bent(node: Any, kind: str) -> bool:
    """Whether a number is on the side where the function is not the identity."""
    given = saved_value(node, "result" if kind == "Relu" else "self")
    if not isinstance(given, torch.Tensor):
        return False
    if given.is_complex():
        return True
    least, most = 0.0, float("inf")
    if kind.startswith("Clamp"):
        found = saved_value(node, "min"), saved_value(node, "max")
        if any(isinstance(each, torch.Tensor) for each in found):
            return False
        least = -float("inf") if found[0] is None else float(found[0])
        most = most if found[1] is None else float(found[1])
    if kind == "Relu":
        return bool((given <= 0).any())
    return bool(((given < least) | (given > most)).any())


def _shape(node: Any, output: int) -> tuple[int, ...] | None:
    """Of what an operation gave; None where it is not known."""
    if node is None:
        return None
    variable = getattr(node, "variable", None)
    if variable is not None:
        return tuple(variable.shape)
    given = outputs_of(node)
    return tuple(given[output].shape) if output < len(given) else None


def _constant(node: Any, *, is_second: bool) -> Factor:
    """The factor or divisor that no gradient goes to."""
    found = saved_value(node, "other" if is_second else "self")
    if not isinstance(found, torch.Tensor):
        return Factor(None if found is None else float(found) or None, is_number=True)
    if found.numel() != 1:
        return Factor(None)
    is_number = _is_number(found)
    return Factor(float(found) or None if is_number else found, is_number)


def _is_number(found: torch.Tensor) -> bool:
    """Whether a tensor stands for a number of Python's: it takes another's type."""
    if found.ndim or found.device.type != "cpu":
        return False
    is_int = not found.is_floating_point()
    other = torch.empty((), dtype=torch.int8 if is_int else torch.float16)
    return torch.result_type(other, found) == other.dtype
