"""What is refused, or brought into shape, before a strategy has changed anything."""

import re
from abc import ABC
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from labkit.checks import UnsupportedLoopError
from labkit.strategies import STRATEGIES
from labkit.strategies.fsdp.sharding import called_ones
from labkit.strategies.fsdp.sharding import check_calls
from labkit.strategies.fsdp.sharding import check_classes
from labkit.strategies.model.materialize import move
from labkit.strategies.model.materialize import release
from labkit.strategies.model.states import named_states
from labkit.strategies.model.states import parameter_names
from labkit.strategies.optimizers.elementwise import UNTRIED
from labkit.strategies.optimizers.elementwise import check_elementwise
from labkit.strategies.optimizers.kept import HOOKED
from labkit.strategies.optimizers.kept import IDS
from labkit.strategies.optimizers.kept import MODULES
from labkit.strategies.optimizers.kept import PARAMETERS
from labkit.strategies.optimizers.kept import check_kept
from labkit.strategies.prepared import check_masks
from labkit.strategies.unsupported import check_supported


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.cfloat))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_max_norm_is_for_one_rank(kind: type[nn.Module], strategy: str) -> None:
    model = nn.Sequential(kind(4, 2, max_norm=1.0))
    check_supported(model, STRATEGIES[strategy], num_ranks=1)
    with pytest.raises(UnsupportedLoopError, match="0 is an embedding with max_norm"):
        check_supported(model, STRATEGIES[strategy], num_ranks=2)
    check_supported(nn.Sequential(kind(4, 2)), STRATEGIES[strategy], num_ranks=2)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_how_to_give_a_scalar_a_dimension_is_python(strategy: str) -> None:
    layer = nn.Module()
    layer.scale = nn.Parameter(torch.tensor(1.0))
    model = nn.Sequential(nn.Sequential(layer))
    with pytest.raises(UnsupportedLoopError) as found:
        check_supported(model, STRATEGIES[strategy], num_ranks=2)
    words = str(found.value)
    line = words[words.index("model") : words.index(", or use ddp")]
    exec(line, {"model": model, "torch": torch})
    check_supported(model, STRATEGIES[strategy], num_ranks=2)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_a_compiled_part_is_not_for_zero3(strategy: str) -> None:
    part: Any = torch.compile(nn.Linear(3, 2), backend="eager")
    model = nn.Sequential(nn.ReLU(), part)
    if strategy != "zero3":
        check_supported(model, STRATEGIES[strategy], num_ranks=2)
        return
    with pytest.raises(UnsupportedLoopError, match=r"with model\[1\]\.compile\(\)"):
        check_supported(model, STRATEGIES[strategy], num_ranks=2)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero3", "fsdp"])
def test_a_scripted_model_is_refused(strategy: str) -> None:
    plain = nn.Linear(3, 2)
    scripted: nn.Module = torch.jit.script(plain)  # type: ignore[no-untyped-call]
    traced: nn.Module = torch.jit.trace(plain, torch.ones(1, 3))  # type: ignore[no-untyped-call]
    for model in (scripted, traced):
        with pytest.raises(UnsupportedLoopError, match="give prepare the plain model"):
            check_supported(model, STRATEGIES[strategy])


@pytest.mark.parametrize(
    ("strategy", "precision", "is_refused"),
    [
        ("single", "bf16", False),
        ("ddp", "bf16", False),
        ("zero1", "fp32", True),
        ("zero3", "fp32", True),
        ("fsdp", "fp32", False),
        ("hsdp", "bf16", True),
    ],
)
def test_complex_parameters(strategy: str, precision: str, is_refused: bool) -> None:
    its = STRATEGIES[strategy]
    if not is_refused:
        check_supported(Complex(), its, num_ranks=2, precision=precision)
        return
    with pytest.raises(UnsupportedLoopError, match="weight is a complex parameter"):
        check_supported(Complex(), its, num_ranks=2, precision=precision)


def test_what_is_brought_to_a_device_is_contiguous() -> None:
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weight, before = conv.weight, conv.weight.detach().clone()
    move(weight, torch.device("cpu"))
    assert conv.weight is weight
    assert weight.is_contiguous()
    assert torch.equal(weight, before)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2).double()


@pytest.mark.parametrize(
    ("strategy", "model", "message"),
    [
        ("zero1", nn.Linear(2, 2).double(), "weight is float64, and zero1 updates"),
        ("zero3", TwoDtypes(), "other.weight is float64, and zero3 updates"),
        ("fsdp", TwoDtypes(), "one.bias is torch.float32 and other.bias is torch.fl"),
    ],
)
def test_dtypes_that_a_strategy_would_change_are_refused(
    strategy: str, model: nn.Module, message: str
) -> None:
    with pytest.raises(UnsupportedLoopError, match=message):
        check_supported(model, STRATEGIES[strategy])
    check_supported(model, STRATEGIES["ddp"])
    check_supported(nn.Linear(2, 2).double(), STRATEGIES["fsdp"])


def test_states_of_other_groups_are_refused() -> None:
    model = nn.Linear(3, 2)
    saved = torch.optim.SGD([model.weight]).state_dict()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, and this one"):
        named_states(saved, optimizer, parameter_names(model, optimizer))


def with_views(kind: str) -> nn.Module:
    """Two layers whose weights are in one storage."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    memory, (first, second) = torch.randn(3, 8), model.parameters()
    with torch.no_grad():
        if kind == "transposed":
            second.data = first.data.t()
        elif kind == "overlapping":
            first.data, second.data = memory[:, :3], memory[:, 2:5]
        elif kind == "columns":
            first.data, second.data = memory[:, :3], memory[:, 3:6]
        elif kind == "flat":
            flat = memory.flatten()
            first.data, second.data = flat[:9].view(3, 3), flat[9:18].view(3, 3)
        elif kind == "tied":
            model[1].weight = first
        elif kind == "meta":
            model.to("meta")
        elif kind == "transposed meta":
            model.to("meta")
            first, second = model.parameters()
            second.data = first.data.t()
    return model


@pytest.mark.parametrize("kind", ["transposed", "overlapping", "transposed meta"])
@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "pipeline", "parameter_server"])
def test_two_parameters_in_the_same_memory(strategy: str, kind: str) -> None:
    model = with_views(kind)
    with pytest.raises(UnsupportedLoopError, match=r"0.weight and 1.weight are two"):
        check_supported(model, STRATEGIES[strategy])
    check_supported(model, STRATEGIES["single"])
    check_supported(model, STRATEGIES["ddp"], num_ranks=2)


@pytest.mark.parametrize("kind", ["columns", "flat", "tied", "meta", "none"])
def test_parameters_without_elements_in_common(kind: str) -> None:
    check_supported(with_views(kind), STRATEGIES["zero1"])
    check_supported(nn.LSTM(3, 4), STRATEGIES["zero1"])


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", "hsdp", "tensor"])
def test_a_parameter_without_elements(strategy: str) -> None:
    model, message = nn.Linear(3, 2), r"registers is .* shape \(1, 0, 3\)"
    model.registers = nn.Parameter(torch.zeros(1, 0, 3))
    with pytest.raises(UnsupportedLoopError, match=message):
        check_supported(model, STRATEGIES[strategy])
    check_supported(model, STRATEGIES["zero1"])
    model.registers.requires_grad_(False)
    if strategy != "zero3":
        check_supported(model, STRATEGIES[strategy])
        return
    with pytest.raises(UnsupportedLoopError, match=message):
        check_supported(model, STRATEGIES[strategy])


def test_modules_that_a_loop_calls_share_no_parameter_under_fsdp() -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    mix = nn.ModuleDict({"mix": nn.Linear(3, 3), "act": nn.Tanh()})
    model = nn.ModuleList([embedding, mix, head])
    check_calls(model)
    assert called_ones(model) == [embedding, mix["mix"], head]
    head.weight = embedding.weight
    with pytest.raises(UnsupportedLoopError, match="ModuleList, has no forward"):
        check_calls(model)
    check_calls(nn.Sequential(embedding, head))  # which calls both in its forward


def test_classes_that_begin_with_abc_are_refused_under_fsdp() -> None:
    class Later(nn.Linear, ABC):
        pass

    class First(ABC, nn.Module):
        pass

    class Net(First):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    check_classes(nn.Sequential(Later(2, 2), nn.Linear(2, 2)))
    with pytest.raises(UnsupportedLoopError, match="those of Net cannot have one"):
        check_classes(model := Net())
    assert type(model) is Net


def test_a_class_does_not_hear_of_the_look_at_it() -> None:
    """Some register their subclasses by name, and take none of a name twice."""
    found: list[str] = []

    class Layer(nn.Module):
        def __init_subclass__(cls, *, kind: str) -> None:
            found.append(kind)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Block(Layer, kind="block"):
        pass

    check_classes(model := nn.Sequential(Block(), Block()))
    assert found == ["block"]
    assert [type(each) for each in model] == [Block, Block]


def test_an_optimizer_without_a_step_for_parts_is_refused() -> None:
    parameters = [*nn.Linear(3, 2).parameters()]
    check_masks(torch.optim.Adam(parameters))
    with pytest.raises(UnsupportedLoopError, match="Rprop sets elements"):
        check_masks(torch.optim.Rprop(parameters))


class Mine(torch.optim.Optimizer):
    """An optimizer whose `direction` is that of each parameter."""

    def __init__(self, parameters: Any, lr: float = 0.0, limit: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr})
        self.limit = limit
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        global num_steps
        num_steps += 1
        history["steps"].append(num_steps)
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.1)
                    p.sub_(self.direction(p, momentum), alpha=group["lr"])

    def direction(self, p: Any, momentum: torch.Tensor) -> torch.Tensor:
        return momentum.sign()


num_steps = 0
history: dict[str, list[int]] = {"steps": []}


class WarmingUp(Mine):
    def direction(self, p: Any, momentum: torch.Tensor) -> torch.Tensor:
        return momentum * min(1.0, len(history["steps"]) / 100) * num_steps


class ByMean(Mine):
    def direction(self, p: Any, momentum: torch.Tensor) -> torch.Tensor:
        mask = (momentum * p.grad > 0).float()
        return momentum * mask / mask.mean()


class ByShape(Mine):
    def direction(self, p: Any, momentum: torch.Tensor) -> torch.Tensor:
        return momentum + (0.01 * p if p.dim() > 1 else 0.0)


class ByStep(Mine):
    def direction(self, p: Any, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / self.num_steps


class ByMatrix(Mine):
    def direction(self, p: Any, momentum: torch.Tensor) -> torch.Tensor:
        return momentum if momentum.size(-1) == 24 else momentum / momentum.size(1)


class AtRandom(Mine):
    def direction(self, p: Any, momentum: torch.Tensor) -> torch.Tensor:
        return momentum + torch.randn_like(p)


class ByAllReduce(Mine):
    def direction(self, p: Any, momentum: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(norm := momentum.norm())
        return momentum / norm


class Clipping(Mine):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(every, self.limit)
        super().step()


class Cautious(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in every]
        super().step()
        for p, old in zip(every, before, strict=True):
            mask = ((p - old) * p.grad < 0).float()
            p.copy_(old + (p - old) * mask / mask.mean())


class Holding(ByMean):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.model = model


class Freeing(ByMean):
    def __del__(self) -> None: ...


class Plain(torch.optim.AdamW):
    pass


MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("optimizer", "is_right", "is_right_by_parameter"),
    [
        (ByMean(MODEL.parameters()), False, False),
        (ByShape(MODEL.parameters()), False, False),
        (ByMatrix([MODEL[1].weight], lr=1.0), False, False),
        (AtRandom(MODEL.parameters()), False, False),
        (Clipping(MODEL.parameters()), False, False),
        (Cautious(MODEL.parameters(), foreach=True), False, False),
        (ByStep(MODEL.parameters()), True, True),
        (ByStep([{"params": [p]} for p in MODEL.parameters()]), False, True),
        (Mine(MODEL.parameters()), True, True),
        (WarmingUp(MODEL.parameters(), lr=1.0), True, True),
        (Plain(MODEL.parameters(), lr=torch.tensor(1e-9)), True, True),
        (Plain(MODEL.parameters(), foreach=True, amsgrad=True), True, True),
        (Plain(MODEL.parameters(), fused=True), True, True),
        (Plain(MODEL.parameters(), capturable=True), None, None),
        (Holding(MODEL), None, None),
        (Freeing(MODEL.parameters()), None, None),
        (ByAllReduce(MODEL.parameters()), None, None),
        (type("Own", (torch.optim.LBFGS,), {})(MODEL.parameters()), None, None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_optimizers_are_tried_on_parts(
    optimizer: torch.optim.Optimizer,
    is_right: bool | None,
    is_right_by_parameter: bool | None,
) -> None:
    """None where it cannot be known."""
    before = [p.clone() for p in MODEL.parameters()]
    settings = [dict(group) for group in optimizer.param_groups]
    drawn, counted = torch.get_rng_state(), num_steps
    seen: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *given: seen.append(given))
    for is_by_group in (True, False):
        expected = is_right if is_by_group else is_right_by_parameter
        refused = pytest.raises(UnsupportedLoopError, match="more than one element")
        with refused if expected is False else nullcontext():
            note = check_elementwise(
                optimizer, torch.device("cpu"), is_by_group=is_by_group
            )
            assert note == (UNTRIED if expected is None else None)
    hook.remove()
    assert not seen
    assert not optimizer.state
    assert all(map(torch.equal, before, MODEL.parameters()))
    assert [dict(group) for group in optimizer.param_groups] == settings
    assert torch.equal(drawn, torch.get_rng_state())
    assert getattr(optimizer, "num_steps", 0) == 0
    assert num_steps == counted
    assert history == {"steps": []}


@pytest.mark.parametrize("name", ["AdamP", "SGDP", "SWATS"])
def test_optimizers_that_look_at_whole_parameters_now_and_then_are_known(
    name: str,
) -> None:
    kind = type(name, (torch.optim.SGD,), {})
    with pytest.raises(UnsupportedLoopError, match=f"{name} computes its update from"):
        check_elementwise(kind(MODEL.parameters()), torch.device("cpu"))


class Around(torch.optim.Optimizer):
    """As a Lookahead."""

    def __init__(self, within: torch.optim.Optimizer) -> None:
        self.within = within

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.within.param_groups


class Several(torch.optim.Optimizer):
    def __init__(self, *within: torch.optim.Optimizer) -> None:
        self.param_groups = [group for each in within for group in each.param_groups]


@pytest.mark.parametrize("make", [Around, Several])
def test_an_optimizer_around_another_is_refused_on_parts(
    make: Callable[[torch.optim.Optimizer], torch.optim.Optimizer],
) -> None:
    optimizer = make(torch.optim.SGD(MODEL.parameters(), lr=0.1))
    with pytest.raises(UnsupportedLoopError, match="wraps another optimizer"):
        check_elementwise(optimizer, torch.device("cpu"))
    check_elementwise(optimizer)  # has whole parameters


def hooked() -> nn.Module:
    model = nn.Linear(4, 2)
    model.register_forward_pre_hook(lambda module, args: None)
    return model


@pytest.mark.parametrize(
    ("keep", "kinds"),
    [
        (lambda model: list(model.parameters()), [PARAMETERS]),
        (lambda model: {"decayed": {model.weight}}, [PARAMETERS]),
        (lambda model: {p: n for n, p in model.named_parameters()}, [PARAMETERS]),
        (lambda model: {id(p): n for n, p in model.named_parameters()}, [IDS]),
        (lambda model: SimpleNamespace(model=model), [MODULES]),
        (lambda model: Plain(model.parameters()), []),
        (lambda model: [p.detach().clone() for p in model.parameters()], []),
        (lambda model: [nn.Linear(4, 2), 7, {"beta": 0.9}], []),
    ],
)
def test_what_an_optimizer_keeps_besides_its_groups(
    keep: Callable[[nn.Module], Any], kinds: list[str]
) -> None:
    model = nn.Linear(4, 2)
    optimizer = Plain(model.parameters())
    optimizer.kept = keep(model)
    for kind in (PARAMETERS, IDS, MODULES, HOOKED):
        refused = pytest.raises(
            UnsupportedLoopError, match=re.escape(f"Plain keeps {kind}")
        )
        with refused if kind in kinds else nullcontext():
            check_kept(optimizer, "fsdp", [kind])
    optimizer.kept = {hooked(): 1}
    check_kept(optimizer, "parameter_server", [MODULES, HOOKED])  # of another model


def test_layers_with_hooks_that_an_optimizer_keeps() -> None:
    model = hooked()
    optimizer = Plain(model.parameters())
    optimizer.kept = [model]
    with pytest.raises(UnsupportedLoopError, match="layers of the model that have"):
        check_kept(optimizer, "parameter_server", [HOOKED])


def test_a_parameter_that_the_model_no_longer_has() -> None:
    model = nn.Linear(4, 2)
    held = list(model.parameters())
    model.weight = nn.Parameter(model.weight.detach().clone())
    release(held, model)
    weight, bias = held
    assert weight.__class__ is not nn.Parameter
    assert "before prepare" in repr(weight)
    assert {weight: 1}[weight] == 1
    assert sum(p.numel() for p in held if p.requires_grad) == 10
    assert (weight.shape, weight.ndim, len(weight)) == ((2, 4), 2, 2)
    assert weight.dtype == torch.float32
    nn.utils.clip_grad_norm_([bias], 1.0)
    refused = pytest.raises(UnsupportedLoopError, match="taken from the model before")
    for use in (
        lambda: nn.utils.clip_grad_norm_(held, 1.0),
        lambda: weight.requires_grad_(False),
        lambda: setattr(weight, "requires_grad", False),
        lambda: weight.data.clamp_(0, 1),
        lambda: weight.device,
        lambda: torch.zeros(2, 4).lerp_(weight, 0.5),
        lambda: torch.optim.SGD(held).zero_grad(),
    ):
        with refused:
            use()
