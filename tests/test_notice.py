"""The loops here know nothing of labkit: they are watched."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from labkit.rank.loss.hooks import Loss
from labkit.rank.loss.hooks import LossHooks
from labkit.rank.loss.hooks import snapshot
from labkit.strategies.autograd import backward


class Notes:
    """A hooks and what it noticed: the losses before each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[Loss | None] = []
        self.hooks = LossHooks()
        self.hooks.on_step = lambda loss, number: self.steps.append(loss)


@pytest.fixture
def notes() -> Iterator[Notes]:
    notes = Notes()
    with notes.hooks.watching():
        yield notes


@pytest.fixture
def x() -> nn.Parameter:
    return nn.Parameter(torch.tensor([3.0, 4.0]))


def sgd(*parameters: nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.125)


# ---- what is noticed ----


def test_the_loss_of_a_plain_loop_is_noticed(notes: Notes, x: nn.Parameter) -> None:
    optimizer = sgd(x)
    losses = []
    for _ in range(3):
        loss = (x**2).sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert notes.steps == losses


def test_accumulation_gives_what_the_step_descends(
    notes: Notes, x: nn.Parameter
) -> None:
    optimizer = sgd(x)
    for number in range(1, 7):
        (number * x.sum() / 7 / 3).backward()
        if number % 3 == 0:
            optimizer.step()
    assert notes.steps[0] == pytest.approx(2.0)
    assert len(notes.steps) == 2


def test_a_step_without_a_loss_is_a_step(notes: Notes, x: nn.Parameter) -> None:
    x.grad = torch.ones(2)
    sgd(x).step()
    assert notes.steps == [None]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_every_optimizer_is_watched(make: Any, notes: Notes, x: nn.Parameter) -> None:
    optimizer = make([x], lr=0.1)
    x.sum().backward()
    optimizer.step()
    assert notes.steps == [7.0]


def test_an_optimizer_from_before_the_cell_is_watched(x: nn.Parameter) -> None:
    optimizer = sgd(x)
    notes = Notes()
    with notes.hooks.watching():
        x.sum().backward()
        optimizer.step()
    assert notes.steps == [7.0]


@pytest.mark.parametrize(
    ("gradient", "loss"), [([1.0, 1.0], 14.0), ([0.5, 0.5], 7.0), ([1.0, 0.5], None)]
)
def test_a_vector_is_a_loss_where_its_gradient_is_that_of_a_sum(
    gradient: list[float], loss: float | None, notes: Notes, x: nn.Parameter
) -> None:
    (2 * x).backward(torch.tensor(gradient))
    sgd(x).step()
    assert notes.steps == [loss]


def test_backward_by_any_name_is_noticed(notes: Notes, x: nn.Parameter) -> None:
    torch.autograd.backward([x.sum(), 2 * x.sum()])
    sgd(x).step()
    assert notes.steps == [21.0]


def test_a_step_that_calls_another_is_one_step(notes: Notes, x: nn.Parameter) -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    optimizer = Lookahead(sgd(x))
    x.sum().backward()
    optimizer.step()
    assert notes.steps == [7.0]


def test_a_step_of_several_evaluations_has_the_first_loss(
    notes: Notes, x: nn.Parameter
) -> None:
    optimizer = torch.optim.LBFGS([x], lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert notes.steps == [25.0]


def test_a_noticed_loss_stays_when_the_tensor_is_changed(
    notes: Notes, x: nn.Parameter
) -> None:
    loss = x.sum()
    loss.backward()
    with torch.no_grad():
        loss.zero_()
    sgd(x).step()
    assert notes.steps == [7.0]


def test_a_closures_loss_adds_to_what_was_accumulated_before_its_step(
    notes: Notes, x: nn.Parameter
) -> None:
    """As Lightning does it; and LBFGS evaluates its closure several times."""
    optimizer = torch.optim.LBFGS([x], lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        loss = (x**2).sum() / 2
        loss.backward()
        return loss

    (x.sum() / 2).backward()
    optimizer.step(closure)
    assert notes.steps == [3.5 + 12.5]


# ---- nothing is different for the loop ----


def test_gradients_are_those_of_an_unwatched_loop(
    notes: Notes, x: nn.Parameter
) -> None:
    loss = (x**2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [12.0, 16.0]


def test_arguments_of_backward_are_passed_on(notes: Notes, x: nn.Parameter) -> None:
    other = nn.Parameter(torch.tensor([1.0, 1.0]))
    loss = (x * other).sum()
    loss.backward(gradient=torch.tensor(2.0), retain_graph=True, inputs=[x])
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    assert other.grad is None


# ---- weight ----


@pytest.mark.parametrize("weight", [0.0, 0.5, 0.75, 1.0, 1.5])
def test_the_weight_scales_the_gradient_exactly(
    weight: float, notes: Notes, x: nn.Parameter
) -> None:
    notes.hooks.weight = weight
    (x**2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [weight * 6.0, weight * 8.0]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_weight_works_for_every_shape_of_a_scalar(
    shape: tuple[int, ...], notes: Notes, x: nn.Parameter
) -> None:
    notes.hooks.weight = 0.5
    x.sum().reshape(shape).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0.5]


def test_the_weight_scales_a_gradient_that_the_loop_gives(
    notes: Notes, x: nn.Parameter
) -> None:
    notes.hooks.weight = 0.5
    x.sum().backward(torch.tensor(8.0))
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0]


def test_the_weight_is_not_in_the_noticed_loss(notes: Notes, x: nn.Parameter) -> None:
    notes.hooks.weight = 0.5
    x.sum().backward()
    sgd(x).step()
    assert notes.steps == [7.0]


# ---- GradScaler ----


def test_a_scaled_loss_is_noticed_unscaled(notes: Notes, x: nn.Parameter) -> None:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    optimizer = sgd(x)
    scaler.scale(x.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert notes.steps == [7.0]
    assert x.tolist() == [2.875, 3.875]


def test_the_weight_works_with_a_scaled_loss(notes: Notes, x: nn.Parameter) -> None:
    notes.hooks.weight = 0.5
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    optimizer = sgd(x)
    scaler.scale(x.sum()).backward()
    scaler.step(optimizer)
    assert notes.steps == [7.0]
    assert x.tolist() == [3.0 - 0.125 / 2, 4.0 - 0.125 / 2]


def test_scale_gives_what_it_gave(notes: Notes) -> None:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0)
    assert scaler.scale(torch.tensor(3.0)).item() == 12.0
    pair = scaler.scale([torch.tensor(1.0), torch.tensor(2.0)])
    assert [each.item() for each in pair] == [4.0, 8.0]


# ---- afterwards ----


def patched_places() -> list[Any]:
    return [
        list(backward._watchers),
        torch.amp.GradScaler.scale,
        torch.amp.GradScaler._unscale_grads_,
        dict(torch_optimizer._global_optimizer_pre_hooks),
        dict(torch_optimizer._global_optimizer_post_hooks),
    ]


def test_everything_is_restored_afterwards() -> None:
    before = patched_places()
    with Notes().hooks.watching():
        assert patched_places() != before
    assert patched_places() == before


def test_everything_is_restored_after_an_exception(x: nn.Parameter) -> None:
    before = patched_places()
    notes = Notes()

    def fail_after_backward() -> None:
        with notes.hooks.watching():
            x.sum().backward()
            raise RuntimeError("in the loop")

    with pytest.raises(RuntimeError, match="in the loop"):
        fail_after_backward()
    assert patched_places() == before
    sgd(x).step()
    assert notes.steps == []


# ---- snapshot ----


@pytest.mark.parametrize(
    "value", [1.5, torch.tensor(1.5), torch.tensor([[1.5]], requires_grad=True)]
)
def test_a_snapshot_is_a_number_on_the_cpu(value: Any) -> None:
    assert snapshot(value) == 1.5


@pytest.mark.parametrize("value", [torch.ones(2), "text", None])
def test_what_is_no_scalar_has_no_snapshot(value: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        snapshot(value)
