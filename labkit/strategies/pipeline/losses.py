"""Tells whether the loss of a batch is the mean of those of its microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit.compat.torch import tree_unflatten
from labkit.strategies.autograd.structures import flatten
from labkit.strategies.autograd.structures import unflatten
from labkit.strategies.pipeline.microbatches import are_other
from labkit.strategies.pipeline.microbatches import is_batch
from labkit.strategies.pipeline.microbatches import joined
from labkit.strategies.prepared import Score
from labkit.strategies.relay.elsewhere import plain
from labkit.strategies.relay.relay import FAILURES

NUM_SAMPLES = 2
"""Of a microbatch: of one alone much is not defined, as a deviation."""


class Means:
    """Tells whether the loss of a batch is the mean of those of its microbatches.

    It is where that holds of each two that follow each other: then they have the same
    weight, and no sample is compared with others. The loss of the whole batch would
    need the model's output for all of it, which a schedule never has at a time.
    """

    def __init__(self, score: Score, spec: Any, *, with_gradients: bool) -> None:
        """`spec` is the tree of a batch. Gradients need not be means where losses are:
        a loss that is divided by its own value is always 1."""
        self.are_right = torch.tensor(True)
        """A tensor, so that nothing waits for a GPU."""
        self._score = score
        self._spec = spec
        self._with_gradients = with_gradients
        self._former: tuple[int, Part, torch.Tensor] | None = None

    @torch.no_grad()
    def add(
        self,
        number: int,
        leaves: Sequence[Any],
        outputs: Sequence[Any],
        loss: torch.Tensor,
    ) -> None:
        """A microbatch: its number, its leaves, what the model has returned, call by
        call, and its loss. The first may come twice: before a schedule's first batch
        torch runs it for the shapes."""
        if len(outputs) != 1:
            self.are_right = torch.zeros_like(loss, dtype=torch.bool)
            return
        [output] = outputs
        part = Part(output, leaves)
        if self._former is not None and number == self._former[0] + 1:
            _, before, loss_before = self._former
            whole = self._loss_of(before.joined_to(part))
            mean = (loss_before + loss) / 2
            is_mean = torch.isclose(
                whole.detach(), mean, rtol=1e-5, atol=1e-7, equal_nan=True
            )
            self.are_right = self.are_right.to(loss.device) & is_mean
            if self._with_gradients and not self._is_mean_gradient(before, part):
                self.are_right = torch.zeros_like(self.are_right)
        self._former = number, part, loss

    def _loss_of(self, part: "Part") -> torch.Tensor:
        stand_in: Any = lambda *args, **kwargs: part.output  # noqa: E731
        batch = tree_unflatten(list(part.leaves), self._spec)
        return plain(self._score(stand_in, batch)["loss"])

    def _is_mean_gradient(self, one: "Part", other: "Part") -> bool:
        """Whether the gradient of both together is the mean of theirs. Of a few samples
        where the loss takes so few: gradients are as large as what the model returns,
        and there are several of them at a time."""
        try:
            return self._are_means(one.head(other), other.head(one))
        except FAILURES:
            return self._are_means(one, other)

    def _are_means(self, one: "Part", other: "Part") -> bool:
        of_both = self._gradients(one.joined_to(other))
        for number, part in enumerate([one, other]):
            for whole, half in zip(of_both, self._gradients(part), strict=True):
                if are_other(whole.chunk(2)[number], half.div_(2)):
                    return False
        return True

    @torch.enable_grad()
    def _gradients(self, part: "Part") -> list[torch.Tensor]:
        """Of the loss, for what the model has returned."""
        found, spec = flatten(part.output)
        inputs = []
        for place, leaf in enumerate(found):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                inputs.append(leaf.detach().requires_grad_())
                found[place] = inputs[-1].clone()  # a loss may write to it
        loss = self._loss_of(Part(unflatten(found, spec), part.leaves))
        gradients = torch.autograd.grad(
            loss, inputs, allow_unused=True, materialize_grads=True
        )
        return [plain(each) for each in gradients]  # of a loss that calls a layer


@dataclass(frozen=True)
class Part:
    """A part of a batch: what the model has returned for it, and its leaves."""

    output: Any
    leaves: Sequence[Any]

    def joined_to(self, other: "Part") -> "Part":
        """The samples of both."""
        pairs = zip(self.leaves, other.leaves, strict=True)
        first, spec = flatten(self.output)
        second, _ = flatten(other.output)
        output = unflatten([*map(joined, zip(first, second, strict=True))], spec)
        # What has no samples is the same in all parts.
        return Part(output, [a if a is b else joined([a, b]) for a, b in pairs])

    def head(self, other: "Part") -> "Part":
        """The first samples, of one of two parts."""
        pairs = zip(self.leaves, other.leaves, strict=True)
        has_samples = [a is not b for a, b in pairs]
        size = max(
            (len(a) for a, has in zip(self.leaves, has_samples, strict=True) if has),
            default=1,
        )

        def cut(leaf: Any) -> Any:
            if not is_batch(leaf) or len(leaf) % size:
                return leaf
            return leaf[: len(leaf) // size * NUM_SAMPLES]

        outputs, spec = flatten(self.output)
        pairs = zip(self.leaves, has_samples, strict=True)
        return Part(
            unflatten([cut(leaf) for leaf in outputs], spec),
            [cut(leaf) if has else leaf for leaf, has in pairs],
        )
