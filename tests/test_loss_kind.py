"""What a loss's graph says of its reduction, on plain torch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from labkit.rank.loss_kind import SUM
from labkit.rank.loss_kind import UNEVEN
from labkit.rank.loss_kind import LossWatch
from labkit.rank.loss_kind import reduction_of

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
WHOLE = torch.tensor([0, 1, 3, 2])
PARTLY = torch.tensor([0, -100, 3, 2])
WEIGHTS = torch.tensor([0.5, 1.0, 1.0, 1.0, 1.0])
MASK = torch.tensor([True, False, True, True])
Loss = Callable[[Tensor], Tensor]


def penalty(x: Tensor) -> Tensor:
    return 0.01 * x.square().sum()


MEANS: dict[str, tuple[Loss, float | None]] = {
    "cross entropy": (lambda x: F.cross_entropy(x, WHOLE), 4),
    "a fraction of it": (lambda x: 0.5 * F.cross_entropy(x, WHOLE) / 3, 4),
    "ignored": (lambda x: F.cross_entropy(x, PARTLY), 3),
    "class weights": (lambda x: F.cross_entropy(x, WHOLE, WEIGHTS), 3.5),
    "2d": (lambda x: F.cross_entropy(x.T[None], PARTLY[None]), 3),
    "in bf16": (lambda x: F.cross_entropy(x, WHOLE).to(torch.bfloat16), 4),
    "mse": (lambda x: F.mse_loss(x, torch.zeros(4, 5)), 20),
    "mean": (lambda x: x.square().mean(), 20),
    "masked": (lambda x: x.square()[MASK].mean(), 15),
    "divided": (lambda x: x.square().sum() / 4, 4),
    "times a fraction": (lambda x: x.square().sum() * 0.25, 4),
    "by its mask": (lambda x: (x.sum(1) * MASK).sum() / MASK.sum(), 3),
    "with a penalty": (lambda x: F.cross_entropy(x, PARTLY) + penalty(x), None),
    "smoothed": (lambda x: F.cross_entropy(x, WHOLE, label_smoothing=0.1), None),
}
SUMS: dict[str, Loss] = {
    "cross entropy": lambda x: F.cross_entropy(x, WHOLE, reduction="sum"),
    "sum": lambda x: x.square().sum(),
    "over dims": lambda x: x.square().sum((0, 1)),
    "l1": lambda x: F.l1_loss(x, torch.zeros(4, 5), reduction="sum"),
    "two of them": lambda x: (
        F.binary_cross_entropy_with_logits(x, torch.zeros(4, 5), reduction="sum")
        - 0.5 * x.square().sum()
    ),
    "of a list": lambda x: -torch.stack([x[0, 0], x[1, 1]]).sum(),
}
NEITHER: dict[str, Loss] = {
    "an element": lambda x: x[0, 0],
    "a product": lambda x: x.mean() * x.sum(),
    "a root": lambda x: x.square().mean().sqrt(),
    "a vector": lambda x: x.sum(1),
    "no graph": lambda x: x.detach().sum(),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_and_what_it_divides_by(name: str) -> None:
    make, count = MEANS[name]
    kind = reduction_of(make(X.clone().requires_grad_()))
    assert kind is not None
    assert kind.reduction == "mean"
    assert (None if kind.count is None else float(kind.count)) == count


@pytest.mark.parametrize("name", SUMS)
def test_a_sum(name: str) -> None:
    kind = reduction_of(SUMS[name](X.clone().requires_grad_()))
    assert kind is not None
    assert kind.reduction == "sum"


@pytest.mark.parametrize("name", NEITHER)
def test_what_is_neither(name: str) -> None:
    assert reduction_of(NEITHER[name](X.clone().requires_grad_())) is None


def test_a_checkpointed_loss_is_left_to_its_backward_pass() -> None:
    x = X.clone().requires_grad_()
    loss = checkpoint(lambda x: F.cross_entropy(x, PARTLY), x, use_reentrant=False)
    kind = reduction_of(loss)
    assert kind is not None
    assert kind.count is None
    loss.backward()  # torch gives each saved tensor once
    assert x.grad is not None


def test_a_long_graph_is_not_walked() -> None:
    x = X.clone().requires_grad_()
    assert reduction_of(sum(x.mean() for _ in range(1000))) is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: F.cross_entropy(x, WHOLE), None),
        (lambda x: F.cross_entropy(x, PARTLY), UNEVEN),
        (lambda x: x.square()[MASK].mean(), UNEVEN),
        (lambda x: x.square().mean(), None),
        (lambda x: x.square().sum(), SUM),
    ],
)
def test_what_is_noted(make: Loss, expected: str | None) -> None:
    x = X.clone().requires_grad_()
    assert LossWatch().look(make(x), 4, 1) == expected


def test_means_over_lengths_that_differ_are_noted() -> None:
    watch = LossWatch()
    x = X.clone().requires_grad_()
    assert watch.look(x[:, :3].mean(), 4, 1) is None
    assert watch.look(x[:2, :3].mean(), 2, 2) is None
    assert watch.look(x[:2, :4].mean(), 2, 3) == UNEVEN


def test_several_losses_of_a_batch_are_compared_each_with_itself() -> None:
    watch = LossWatch()
    x = X.clone().requires_grad_()
    for microbatch in (1, 2):
        assert watch.look(x.mean(), 4, microbatch) is None
        assert watch.look(x[:, :3].mean(), 4, microbatch) is None
