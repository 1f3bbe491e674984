"""What a loss is a mean or a sum over, as its autograd graph says."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

MAX_NODES = 32
"""Of a graph, from the loss on, that are looked at: it begins with few."""

PASSED = (
    "NegBackward",
    "SqueezeBackward",
    "UnsqueezeBackward",
    "ViewBackward",
    "ReshapeAliasBackward",
    "ToCopyBackward",
    "CloneBackward",
    "AliasBackward",
)
"""Operations that leave it as it is."""

Value = float | torch.Tensor

UNEVEN = (
    "the loss is a mean over a number of elements that differs between samples "
    "or batches (ignore_index, a mask, class weights, lengths), but ranks are "
    "averaged by their number of samples: the gradient differs from that of one "
    "process on the whole batch. Pass prepare(..., weigh=f), where f(batch) "
    "returns what the mean of that batch divides by, for example weigh=lambda "
    "batch: (batch[1] != -100).sum()"
)
SUM = (
    "the loss is a sum over samples, but the losses of ranks and microbatches "
    "are averaged: the gradient is a fraction of what one process computes on "
    'the whole batch. Pass prepare(..., reduction="sum"), or use a mean'
)


@dataclass(frozen=True)
class LossKind:
    """How a loss was made of many numbers."""

    reduction: str
    """ "mean" or "sum"."""
    count: Value | None = None
    """What a mean divides by; None where its graph does not say it."""
    is_weighted: bool = False
    """Whether classes count differently."""


def reduction_of(loss: torch.Tensor) -> LossKind | None:
    """What `loss` is; None where its graph does not say it.

    It may be one, times a number, or several added up: where there is a mean among
    them, sums are taken for penalties. A count may be on a GPU: to read it waits.
    """
    terms = list(_terms(loss.grad_fn)) if loss.numel() == 1 else []
    if not terms or None in terms:
        return None
    means = [term for term in terms if term is not None and term.reduction == "mean"]
    if not means:
        return terms[0]
    # Of a mean over parameters, a penalty as well, nobody knows a thing.
    counts = [term for term in means if term.count is not None]
    return counts[0] if len(terms) == 1 and counts else LossKind("mean")


class LossWatch:
    """Looks at a rank's losses: are the ranks' means averaged as they should be?"""

    def __init__(self) -> None:
        self._microbatch = 0
        self._place = 0
        """Losses of this microbatch so far: a loop may have several."""
        self._before: dict[int, float] = {}
        """By their place, how many numbers a sample the last mean was over."""

    def look(
        self,
        loss: torch.Tensor,
        num_samples: int | None,
        microbatch: int,
        seed: torch.Tensor | None = None,
    ) -> str | None:
        """What is to be noted of a loss of this microbatch; None where it is as it is
        taken to be.

        Without `num_samples`, in a loop over data of its own, sums alone are seen.
        """
        self._place = self._place + 1 if microbatch == self._microbatch else 0
        self._microbatch = microbatch
        # A number in a graph is no tensor to a dispatch mode, as of the step's probe.
        with torch._C._DisableTorchDispatch():
            kind = reduction_of(loss)
            if seed is not None and is_sum_of(loss, seed):
                return SUM
        if kind is None:
            return None
        if kind.is_weighted:
            return UNEVEN
        if kind.reduction == "sum":
            return SUM
        if kind.count is None or not num_samples:
            return None
        each = float(kind.count) / num_samples
        before = self._before.setdefault(self._place, each)
        return None if each.is_integer() and each == before else UNEVEN


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


def _terms(root: Any) -> Iterator[LossKind | None]:
    """The means and sums that are added up in a graph; None for what is neither."""
    waiting: list[tuple[Any, Value]] = [(root, 1.0)]
    for _ in range(MAX_NODES):
        if not waiting:
            return
        node, divisor = waiting.pop()
        kind = "" if node is None else node.name()
        inputs = [each for each, _ in node.next_functions] if node else []
        if kind.startswith(("AddBackward", "SubBackward")):
            waiting += [(each, divisor) for each in inputs if each is not None]
        elif kind.startswith(PASSED):
            waiting.append((inputs[0], divisor))
        elif kind.startswith(("MulBackward", "DivBackward")):
            ours = [each for each in inputs if each is not None]
            factor = _constant(node, inputs) if len(ours) == 1 else None
            if factor is None:
                yield None
            elif kind.startswith("Mul"):
                waiting.append((ours[0], divisor / factor))
            else:
                waiting.append((ours[0], divisor * factor))
        else:
            yield _term(node, kind, divisor)
    yield None


def _term(node: Any, kind: str, divisor: Value) -> LossKind | None:
    """What an operation makes of many numbers."""
    if kind.startswith("MeanBackward"):
        return LossKind("mean", node._saved_self_sym_numel)
    reduction = getattr(node, "_saved_reduction", None)
    if kind.startswith("SumBackward") or reduction == 2:
        return _sum(divisor)
    if reduction == 1:
        if kind.startswith("NllLoss"):
            is_weighted = _saved(node, "weight") is not None
            return LossKind("mean", _saved(node, "total_weight"), is_weighted)
        target = _saved(node, "target")
        return LossKind("mean", None if target is None else target.numel())
    return None


def _sum(divisor: Value) -> LossKind:
    """A sum over samples, or the mean that it becomes by a division."""
    is_sum = isinstance(divisor, float) and abs(divisor) <= 2  # as -0.5 * x.sum()
    return LossKind("sum") if is_sum else LossKind("mean", divisor)


def _constant(node: Any, inputs: list[Any]) -> Value | None:
    """The factor or divisor that no gradient goes to."""
    is_second = len(inputs) < 2 or inputs[1] is None
    found = _saved(node, "other" if is_second else "self")
    if isinstance(found, torch.Tensor):
        if found.numel() != 1:
            return None
        if found.device.type != "cpu":
            return found
    return None if found is None else float(found) or None


def _saved(node: Any, name: str) -> Any:
    """A tensor or number that is saved for the backward pass; None where hooks keep
    it, which may compute it again."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None:
        return getattr(node, f"_saved_{name}", None)
    return saved.data if saved.unpack_hook is None else None
