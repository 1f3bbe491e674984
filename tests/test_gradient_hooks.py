"""Gradients of parameters: hooks for them, and a list of them that a loop keeps."""

from typing import Any

import pytest
import torch
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.notebook.runs.run import Run
from labkit.rank.loss.gradient_hooks import watching_gradient_hooks
from labkit.strategies.model import gradients
from labkit.strategies.model.gradients import CellGradients
from labkit.strategies.model.gradients import owner_of

pytestmark = pytest.mark.timeout(120)

SET_UP = """
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
data = TensorDataset(torch.randn(16, 6), torch.randint(0, 6, (16,)))
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.layers[3].weight = self.layers[0].weight
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
"""
PREPARE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
"""
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
FIT = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fit(model, data, F.cross_entropy, optimizer=optimizer, batch_size=8)
"""
HOOK = "model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))"
HOOKS = """
for p in model.parameters():
    p.{register}(print)
"""


def train(lab: Lab, strategy: str, *parts: str) -> Run:
    return lab.train(strategy, "\n".join(parts), live=False, timeout=60)


def test_hooks_of_many_parameters_are_one_note(lab: Lab) -> None:
    hooks = HOOKS.format(register="register_hook")
    run = train(lab, "ddp", SET_UP, PREPARE, hooks, LOOP)
    [note] = run.notes
    assert note.startswith("0.weight has a hook for its gradient")


@pytest.mark.parametrize(
    "name", ["register_hook", "register_post_accumulate_grad_hook"]
)
def test_hooks_that_would_never_be_called_are_refused_at_once(
    lab: Lab, name: str
) -> None:
    with pytest.raises(RankError, match=r"0.weight has a hook .* never calls"):
        train(lab, "fsdp", SET_UP, PREPARE, HOOKS.format(register=name))
    assert not lab.runs[-1].notes


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_hooks_that_come_after_the_strategys_are_refused(
    lab: Lab, strategy: str
) -> None:
    hooks = HOOKS.format(register="register_post_accumulate_grad_hook")
    with pytest.raises(RankError, match=f"would be called after that of {strategy}"):
        train(lab, strategy, SET_UP, PREPARE, hooks)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_hooks_of_a_former_strategy_are_none_of_the_loop(
    lab: Lab, strategy: str
) -> None:
    train(lab, strategy, SET_UP, PREPARE, LOOP)
    run = train(lab, "ddp", PREPARE, LOOP)
    assert not run.notes


def test_fit_in_microbatches_calls_hooks_with_parts(lab: Lab) -> None:
    run = train(lab, "pipeline", SET_UP, HOOK, FIT)
    assert any("2.weight has a hook for its gradient" in note for note in run.notes)
    run = train(lab, "pipeline", SET_UP, HOOK, PREPARE, LOOP)
    assert not any("has a hook" in note for note in run.notes)
    run = train(lab, "pipeline", SET_UP, FIT)
    assert not any("has a hook" in note for note in run.notes)


def test_stages_call_hooks_with_their_parts_of_what_they_share(lab: Lab) -> None:
    make = "model = Tied()"
    hook = "model.layers[{}].weight.register_hook(lambda gradient: gradient / 2)"
    run = train(lab, "pipeline", SET_UP, make, PREPARE, hook.format(0), LOOP)
    assert any("layers.0.weight has a hook" in note for note in run.notes)
    run = train(lab, "pipeline", SET_UP, make, PREPARE, hook.format(1), LOOP)
    assert not any("has a hook" in note for note in run.notes)


def test_what_others_put_in_the_place_of_register_hook_stays() -> None:
    def own(self: nn.Parameter, hook: object) -> None: ...

    name = "register_hook"
    setattr(nn.Parameter, name, own)
    try:
        with watching_gradient_hooks(lambda parameter, is_after: None):
            assert vars(nn.Parameter)[name] is not own
        assert vars(nn.Parameter)[name] is own
        delattr(nn.Parameter, name)
        with watching_gradient_hooks(lambda parameter, is_after: None):
            setattr(nn.Parameter, name, own)  # as a library that is imported there
        assert vars(nn.Parameter)[name] is own
    finally:
        delattr(nn.Parameter, name)
    with watching_gradient_hooks(lambda parameter, is_after: None):
        delattr(nn.Parameter, name)
    assert name not in vars(nn.Parameter)
    assert "register_post_accumulate_grad_hook" not in vars(nn.Parameter)


OF_OWN_NORM = """
class Norm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x)
model = nn.Sequential(nn.Linear(6, 8), Norm(8), nn.Linear(8, 6))
"""
BACKWARD = """
model.zero_grad()
model(data[8 * rank : 8 * rank + 8][0]).square().sum().backward()
sums = model[2].weight.grad.clone()
dist.all_reduce(sums)
assert torch.allclose(sums, world_size * model[2].weight.grad), "not averaged"
"""


def test_a_refused_run_leaves_a_former_runs_model_to_its_strategy(lab: Lab) -> None:
    train(lab, "ddp", SET_UP, OF_OWN_NORM, PREPARE)
    lab.run(BACKWARD)
    with pytest.raises(RankError, match="--sync-batchnorm: Norm has a forward"):
        lab.train("ddp", PREPARE, live=False, sync_batchnorm=True)
    lab.run(BACKWARD)


def test_a_list_of_gradients_has_those_of_each_step(lab: Lab) -> None:
    """Where they are set to 0, and not to None, they are the same tensors."""
    keep = """
kept = None
for epoch in range(2):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        kept = kept or [p.grad for p in model.parameters()]
        now = [p.grad for p in model.parameters()]
        are_same = [a is b and torch.equal(a, b) for a, b in zip(kept, now)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        are_zero = [not each.any() for each in kept]
"""
    train(lab, "ddp", SET_UP, PREPARE, keep)
    assert lab.pull("are_same", "all") == [[True] * 4] * 2
    assert lab.pull("are_zero", "all") == [[True] * 4] * 2


class InParts:
    """Has the gradient of each parameter in parts."""

    hides_gradients = False

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        return torch.ones_like(parameter)


def test_who_has_a_gradient_in_parts_is_forgotten_with_the_strategy() -> None:
    parameter, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    owner: Any = InParts()
    first, second = CellGradients(owner, [parameter]), CellGradients(owner, [other])
    assert owner_of(parameter) is owner
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(2))
    del first
    assert owner_of(parameter) is None
    assert parameter.grad is None
    assert id(parameter) not in gradients._of
    assert owner_of(other) is second.owner
