"""What a model's forward passes change besides computing."""

import copy

import pytest
import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.rank.steps.forward_state import BATCHNORM
from labkit.rank.steps.forward_state import digest
from labkit.rank.steps.optimizer import PreparedOptimizer
from labkit.strategies import STRATEGIES
from labkit.strategies.model.spectral import in_one_precision
from labkit.strategies.model.writes import NUM_PASSES
from labkit.strategies.model.writes import Writes
from labkit.strategies.model.writes import watch_forward
from labkit.strategies.prepared import Prepared
from labkit.train_options import TrainOptions

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Counts calls as an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)
        self.num_calls = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.count += 1
        result: torch.Tensor = self.fc(x)
        return result


class Drawing(nn.Linear):
    """Draws from a generator of its own, as a layer that is left out at random."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(1, generator=self.generator)


def prepare(model: nn.Module, accumulate: int) -> tuple[PreparedOptimizer, list[str]]:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = Prepared(
        STRATEGIES["single"], model, sgd, None, CPU, TrainOptions(accumulate=accumulate)
    )
    notes: list[str] = []
    prepared.note = notes.append
    return PreparedOptimizer(prepared, lambda own, closure: own.prepared.step()), notes


@pytest.mark.parametrize(
    ("model", "accumulate", "found"),
    [
        (Counting(), 2, ["forward changes count (and 1 more): with --accumulate 2"]),
        (Counting(), 1, []),
        (Drawing(), 2, ["forward changes generator: with --accumulate 2"]),
        (Drawing(), 1, []),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 2, [BATCHNORM]),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 1, []),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval()), 2, []),
    ],
)
def test_what_each_microbatch_changes_is_noted(
    model: nn.Module, accumulate: int, found: list[str]
) -> None:
    optimizer, notes = prepare(model, accumulate)
    for number in range(4):
        optimizer.begin_microbatch(is_last=accumulate == 1 or number % 2 == 1)
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
    assert [note.split(" it does")[0] for note in notes] == found


def test_digests_tell_tensors_apart() -> None:
    tensors = [
        torch.zeros(3),
        torch.ones(3),
        torch.ones(3, dtype=torch.bool),
        torch.ones((), dtype=torch.int64),
        torch.ones(2, dtype=torch.cfloat),
        torch.eye(3).to_sparse(),
        torch.zeros(0),
        torch.linspace(0, 1, 8)[::2],
        torch.eye(4).diagonal(),
        torch.full((1,), 3.0).expand(4),
        torch.fft.fft(torch.arange(5.0)).conj(),
    ]
    numbers = {digest([each], CPU) for each in [*tensors, None]}
    assert len(numbers) >= len(tensors)
    assert all(digest([each.clone()], CPU) in numbers for each in tensors)
    assert digest([torch.ones(3, device="meta")], CPU) == digest([None], CPU)


def test_gradients_of_no_backward_pass_are_refused_between_microbatches() -> None:
    model = nn.Linear(3, 1)
    optimizer, _ = prepare(model, 2)
    before = model.weight.detach().clone()
    learner = copy.deepcopy(model)
    learner(torch.ones(2, 3)).mean().backward()
    model.weight.grad = learner.weight.grad
    with pytest.raises(UnsupportedLoopError, match="no backward pass through the"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert prepare(nn.Linear(3, 1), 1)[0].step() is None


@pytest.mark.parametrize(
    "spectral", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm]
)
def test_spectral_norm_takes_weights_of_another_precision(spectral: object) -> None:
    assert callable(spectral)
    torch.manual_seed(0)
    linear = spectral(nn.Linear(6, 4))
    x = torch.randn(2, 6)
    for parameter in linear.parameters():
        parameter.data = parameter.data.bfloat16()
    with pytest.raises(RuntimeError, match=r"same dtype|expected scalar type"):
        linear(x.bfloat16())
    undo = in_one_precision(linear)
    plain = copy.deepcopy(linear)
    assert linear(x.bfloat16()).dtype is torch.bfloat16
    for parameter in plain.parameters():
        parameter.data = parameter.data.float()
    torch.testing.assert_close(
        linear(x.bfloat16()).float(), plain(x), rtol=0.1, atol=0.1
    )
    for each in undo:
        each()
    with pytest.raises(RuntimeError, match=r"same dtype|expected scalar type"):
        linear(x.bfloat16())


class Renormed(nn.Linear):
    """Brings its rows to length 1 in forward, or gives its weight another tensor."""

    assigns = False
    writes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes and self.assigns:
            self.weight.data = self.weight.data.clone()
        elif self.writes:
            self.weight.data.copy_(nn.functional.normalize(self.weight.data))
        return super().forward(x)


@pytest.mark.parametrize("assigns", [False, True])
def test_a_forward_pass_that_changes_a_parameter_is_seen(assigns: bool) -> None:
    layer, found = Renormed(3, 2), list[str]()
    layer.assigns = assigns
    writes = Writes(found.append, with_places=True)
    for number in range(NUM_PASSES + 2):
        layer.weight.data.copy_(torch.randn(2, 3))  # between passes all is allowed
        layer.writes = number in (1, NUM_PASSES)
        writes.begin(0, layer.training, lambda: dict(layer.named_parameters()))
        layer(torch.ones(1, 3))
        writes.end(0, lambda: dict(layer.named_parameters()))
    assert found == ["weight"]
    layer.eval()  # passes of another kind have not been looked at
    layer.writes = True
    layer.weight.data.copy_(torch.randn(2, 3))
    writes.begin(0, layer.training, lambda: dict(layer.named_parameters()))
    layer(torch.ones(1, 3))
    writes.end(0, lambda: dict(layer.named_parameters()))
    assert found == ["weight"] * 2


def test_a_pass_that_failed_and_a_freed_parameter_are_no_changes() -> None:
    layer, found = Renormed(3, 2), list[str]()
    writes = Writes(found.append)
    for _ in range(NUM_PASSES):
        writes.begin(0, layer.training, lambda: dict(layer.named_parameters()))
    layer(torch.ones(1, 3))
    writes.begin(0, layer.training, lambda: dict(layer.named_parameters()))
    writes.end(0, lambda: dict(layer.named_parameters()))
    layer.eval()
    writes.begin(0, layer.training, lambda: dict(layer.named_parameters()))
    layer.weight.untyped_storage().resize_(0)
    writes.end(0, lambda: dict(layer.named_parameters()))
    assert not found


def test_a_watched_model_keeps_its_forward_and_copies_are_not_watched() -> None:
    layer, found = Renormed(3, 2), list[str]()
    undo = watch_forward(layer, found.append)
    copy.deepcopy(layer)(torch.ones(1, 3))
    assert not found
    layer(torch.ones(1, 3))
    assert found == ["weight"]
    undo()
    assert "forward" not in vars(layer)
