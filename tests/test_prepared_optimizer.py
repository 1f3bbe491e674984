"""The optimizer that `prepare` returns is to a loop what the user's own is."""

import copy
import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.checks import UnsupportedLoopError
from labkit.rank.steps.optimizer import PreparedOptimizer
from labkit.strategies import STRATEGIES
from labkit.strategies.prepared import Prepared
from labkit.train_options import TrainOptions


class Scaled(torch.optim.SGD):
    """With a setting that is in no group."""

    scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None, *, times: float = 1.0) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * self.scale * times)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


def prepare(model: nn.Module, own: torch.optim.Optimizer) -> PreparedOptimizer:
    single, cpu = STRATEGIES["single"], torch.device("cpu")
    prepared = Prepared(single, model, own, None, cpu, TrainOptions())
    return PreparedOptimizer(prepared, lambda _, closure: prepared.step(closure))


def movement(model: nn.Module, optimizer: PreparedOptimizer, **arguments: Any) -> float:
    """How far one step moves a weight whose gradient is 1."""
    weight = next(model.parameters())
    weight.grad = torch.ones_like(weight)
    before = weight.item()
    optimizer.step(**arguments)
    return before - weight.item()


def test_an_attribute_that_is_set_is_the_users_optimizers(model: nn.Module) -> None:
    own = Scaled(model.parameters(), lr=1.0)
    optimizer = prepare(model, own)
    optimizer.scale *= 0.5
    assert (own.scale, optimizer.scale) == (0.5, 0.5)
    assert movement(model, optimizer) == pytest.approx(0.5)
    del optimizer.scale
    assert movement(model, optimizer) == pytest.approx(1.0)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_wraps_the_step_of_what_it_was_made_with(model: nn.Module) -> None:
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = prepare(model, own)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert "step" in vars(optimizer)
    assert "step" not in vars(own)
    moved = []
    for _ in range(3):
        moved.append(movement(model, optimizer))
        scheduler.step()
    assert moved == pytest.approx([1.0, 0.5, 0.25])


def test_arguments_of_a_step_of_its_own_reach_it(model: nn.Module) -> None:
    optimizer = prepare(model, Scaled(model.parameters(), lr=1.0))
    evaluated: list[int] = []
    closure = functools.partial(evaluated.append, 0)
    assert movement(model, optimizer, times=0.5) == pytest.approx(0.5)
    assert movement(model, optimizer) == pytest.approx(1.0)
    assert movement(model, optimizer, closure=closure, times=3.0) == pytest.approx(3.0)
    assert evaluated == [0]
    for unnamed in [(0.5,), (None, 0.5)]:
        with pytest.raises(UnsupportedLoopError, match=r"with 0\.5, which is no"):
            optimizer.step(*unnamed)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["zero2", "parameter_server"])
def test_what_a_step_elsewhere_would_return_is_refused(lab: Lab, strategy: str) -> None:
    use = "factor = optimizer.step()\n"
    with pytest.raises(
        RankError, match=r"factor = optimizer.step\(\) uses what Counted"
    ):
        lab.train(strategy, OWN + use, live=False)
    use = "lambda: optimizer.step()\nfound = stopper.step()\n"
    with pytest.raises(RankError, match="name 'stopper' is not defined"):
        lab.train(strategy, OWN + use, live=False)


def test_what_a_step_of_its_own_returns_is_the_loops(model: nn.Module) -> None:
    class Mine(Scaled):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step(closure)
            return 0.5

    optimizer = prepare(model, Mine(model.parameters(), lr=1.0))
    next(model.parameters()).grad = torch.ones(1, 1)
    assert optimizer.step() == 0.5
    assert optimizer.step(lambda: 3.0) == 0.5
    plain = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert plain.step() is None
    assert plain.step(lambda: 3.0) == 3.0


def test_a_zero_grad_of_its_own_may_take_nothing(model: nn.Module) -> None:
    class Mine(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            super().zero_grad()

    class Others(torch.optim.SGD):
        def zero_grad(self, *args: Any, **arguments: Any) -> None:
            super().zero_grad(*args, **arguments)

    weight = next(model.parameters())
    weight.grad = torch.ones_like(weight)
    prepare(model, Mine(model.parameters())).zero_grad()
    assert weight.grad is None
    weight.grad = torch.ones_like(weight)
    prepare(model, Others(model.parameters())).zero_grad(set_to_none=False)
    assert weight.grad == 0


DECAYING = """
class Decaying(torch.optim.SGD):
    {count}
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        {does}

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
optimizer = Decaying(model.parameters(), lr=1.0)
model, optimizer, loader = prepare(model, optimizer, torch.ones(8, 2), batch_size=4)
for x in loader:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
rate = optimizer.param_groups[0]["lr"]
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "pipeline", "parameter_server"])
def test_a_zero_grad_of_its_own_is_called_as_the_loop_calls_it(
    lab: Lab, strategy: str
) -> None:
    code = DECAYING.format(count="", does="self.param_groups[0]['lr'] /= 2")
    lab.train(strategy, code, live=False)
    assert lab.pull("rate") == 0.25


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("g['params'][0].grad = torch.ones_like(g['params'][0])", "keeps gradients"),
        ("g['params'][0].data.mul_(0.9)", "changes parameters"),
    ],
)
def test_a_zero_grad_that_does_more_than_that_is_refused_by_zero(
    lab: Lab, does: str, words: str
) -> None:
    """Which has taken the gradients with the step."""
    code = DECAYING.format(count="", does=f"g, = self.param_groups; {does}")
    with pytest.raises(RankError, match=rf"Decaying\.zero_grad\(\) {words}"):
        lab.train("zero2", code, live=False)


@pytest.mark.timeout(240)
def test_what_a_zero_grad_of_its_own_sets_has_to_reach_the_servers(lab: Lab) -> None:
    code = DECAYING.format(count="count = 0", does="self.count += 1")
    with pytest.raises(RankError, match=r"Decaying\.zero_grad\(\) sets its count, and"):
        lab.train("parameter_server", code, live=False)


def test_its_class_is_the_users(model: nn.Module) -> None:
    given = prepare(model, Scaled(model.parameters()))
    optimizer = PreparedOptimizer.named_as(Scaled)(given.prepared, given.take_step)
    assert isinstance(optimizer, Scaled)
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(optimizer, PreparedOptimizer)
    assert not isinstance(optimizer, torch.optim.Adam)
    assert optimizer.__class__ is Scaled
    assert type(optimizer).__name__ == "Scaled"
    assert isinstance(copy.copy(optimizer), Scaled)
    with pytest.raises(UnsupportedLoopError, match="Keep its state instead"):
        copy.deepcopy(optimizer)


@pytest.mark.timeout(240)
def test_what_prepare_returns_is_what_it_was_given(lab: Lab) -> None:
    code = """
class Mine(torch.optim.SGD):
    pass

class Loader(torch.utils.data.DataLoader):
    pass

model = torch.nn.Linear(2, 2)
data = Loader(torch.zeros(8, 2), batch_size=4)
model, optimizer, loader = prepare(model, Mine(model.parameters()), data)
assert isinstance(optimizer, Mine), type(optimizer)
assert type(optimizer).__name__ == "Mine"
assert isinstance(loader, Loader), type(loader)
assert isinstance(loader.share(data), torch.utils.data.DataLoader)
for x in loader:
    model(x).mean().backward()
    optimizer.step()
"""
    lab.train("ddp", code, live=False)
    again = """
model, optimizer, loader = prepare(model, optimizer, loader)
assert type(optimizer).__name__ == 'Mine'
sizes = [len(x) for x in loader]
assert isinstance(loader.share(loader), torch.utils.data.DataLoader)
"""
    lab.train("ddp", again, live=False)
    assert lab.pull("sizes", "all") == [[2, 2], [2, 2]]
    pairs = """
data = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 2))
model, optimizer, loader = prepare(model, optimizer, data, batch_size=4)
"""
    lab.train("ddp", pairs, live=False)
    fitted = """
mse = torch.nn.functional.mse_loss
fit(model, loader, mse, optimizer=optimizer, validate=loader)
"""
    assert "val_loss" in lab.train("ddp", fitted, live=False).history


HALVED = """
layers = torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer, loader = prepare(model, optimizer, torch.ones(8, 2), batch_size=4)

def halve(optimizer, args, kwargs):
    optimizer.param_groups[0]["lr"] /= 2

optimizer.register_step_pre_hook(halve)
for x in loader:
    model(x).mean().backward()
    optimizer.step()
rate = optimizer.param_groups[0]["lr"]
"""


@pytest.mark.timeout(240)
def test_a_hook_for_the_step_of_split_layers_may_come_after_prepare(lab: Lab) -> None:
    plan = {"plan": {"0": "colwise", "2": "rowwise"}}
    lab.train("tensor", HALVED, live=False, config=plan)
    assert lab.pull("rate", "all") == [0.25, 0.25]


GIVES_PARAMETERS = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, list(self.parameters())

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer, loader = prepare(model, optimizer, torch.ones(8, 2), batch_size=4)
for x in loader:
    model(x)[0].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.timeout(240)
def test_a_model_may_return_its_parameters(lab: Lab) -> None:
    assert lab.train("fsdp", GIVES_PARAMETERS, live=False).num_steps == 2


@pytest.mark.timeout(240)
def test_a_loss_of_parameters_that_a_model_returns_is_explained(lab: Lab) -> None:
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    penalty = "(model(x)[0].mean() + sum(p.square().sum() for p in {}))"
    code = GIVES_PARAMETERS.replace("model(x)[0].mean()", penalty)
    with pytest.raises(RankError, match="if forward returns a parameter"):
        lab.train("zero3", code.format("model(x)[1]"), live=False, config=config)
    code = code.format("model.parameters()")
    assert lab.train("zero3", code, live=False, config=config).num_steps == 2


OWN = """
class Counted(torch.optim.SGD):
    count = 0
    def step(self, closure=None, times=1):
        self.count += times
        return super().step(closure)
    def shrink(self):
        pass

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
optimizer = Counted(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(model, optimizer, torch.zeros(8, 2), batch_size=4)
torch.optim.lr_scheduler.StepLR(optimizer, 1)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("strategy", "use", "message"),
    [
        ("parameter_server", "optimizer.count", "that steps is the servers'"),
        (
            "parameter_server",
            "optimizer.shrink()",
            "optimizer that steps is the servers'",
        ),
        ("parameter_server", "optimizer.count = 1", "what is set here does not reach"),
        ("pipeline", "optimizer.shrink()", "a rank updates those of its own stage"),
        ("zero1", "optimizer.shrink()", "under zero1 a rank has only a part of them"),
        ("zero1", "assert optimizer.count == 0", None),
        ("zero1", "optimizer.step(times=2)", "DeepSpeed takes the step, without it"),
        ("parameter_server", "optimizer.step(times=2)", "servers take the step"),
        ("fsdp", "optimizer.step(times=2); assert optimizer.count == 2", None),
        ("ddp", "optimizer.shrink()", None),
    ],
)
def test_what_is_not_here_as_in_one_process_is_refused(
    lab: Lab, strategy: str, use: str, message: str | None
) -> None:
    expected = (
        nullcontext() if message is None else pytest.raises(RankError, match=message)
    )
    with expected:
        lab.train(strategy, OWN + use, live=False)


SAM = """
class SAM(torch.optim.Optimizer):
    def __init__(self, params, rho, **settings):
        super().__init__(params, dict(rho=rho, **settings))
        self.base = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base.param_groups
    def parameters(self):
        return [p for group in self.param_groups for p in group["params"]]
    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        for p in self.parameters():
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=self.param_groups[0]["rho"] / norm.item())
        self.zero_grad()
    @torch.no_grad()
    def second_step(self):
        for p in self.parameters():
            p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

torch.manual_seed(0)
layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
model = torch.nn.Sequential(*layers)
optimizer = SAM(model.parameters(), rho=0.5, lr=0.2, momentum=0.9)
x = torch.randn(22, 4)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=8, shuffle=False
)
model[1].eval()
for n, (x, y) in enumerate(loader):
    model[1].train(n == 0)
    compute = lambda: torch.nn.functional.cross_entropy(model(x), y)
    compute().backward()
    optimizer.first_step()
    compute().backward()
    optimizer.second_step()
found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
"""


@pytest.mark.timeout(240)
def test_an_optimizer_steps_its_own_in_another_method(lab: Lab) -> None:
    code = SAM.replace("model[1].train(n == 0)", "")
    lab.train("single", code, live=False)
    expected = lab.pull("found", ranks=0)
    run = lab.train("ddp", code, live=False)
    assert run.num_steps == 3
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, expected)


@pytest.mark.timeout(240)
def test_buffers_are_shared_with_such_a_step(lab: Lab) -> None:
    lab.train("ddp", SAM, live=False)
    first, second = lab.pull("found", "all")
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.timeout(240)
def test_such_a_step_knows_nothing_of_the_options(lab: Lab) -> None:
    for strategy in ("ddp", "single"):
        with pytest.raises(RankError, match="without --accumulate, --clip"):
            lab.train(strategy, SAM, live=False, clip=0.1)


OLD_GRAPH = """
from labkit.data import digits
from labkit.models import mlp
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=64)
outputs = model(next(iter(loader))[0])
outputs.square().mean().backward(retain_graph=True)
optimizer.step()
optimizer.zero_grad()
outputs.abs().mean().backward()
"""


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "fsdp"])
def test_autograd_knows_that_a_step_has_changed_what_a_graph_needs(
    lab: Lab, strategy: str
) -> None:
    with pytest.raises(RankError, match="modified by an inplace operation"):
        lab.train(strategy, OLD_GRAPH, live=False)
