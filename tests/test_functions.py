"""Functions are defined as a notebook does it, and called in another process."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import serialization
from labkit.notebook.kernel.pickled_function import pack_function
from labkit.notebook.kernel.pickled_function import takes_rank

CALL = """
import sys
from labkit import serialization

payload = open(sys.argv[1], "rb").read()
print(serialization.loads(payload)(), "torch" in sys.modules)
"""


def in_notebook(source: str) -> dict[str, Any]:
    """The names that `source` defines in a notebook's cell."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(source), namespace)
    return namespace


def call_elsewhere(payload: bytes, folder: Path) -> str:
    """What a pickled function returns in a new process, and whether torch is there."""
    (folder / "payload").write_bytes(payload)
    done = subprocess.run(
        [sys.executable, "-c", CALL, "payload"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- how a function is called ----


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: 0, False),
        (lambda rank, world_size: 0, True),
        (lambda a, b: 0, True),
        (lambda rank, world_size=1: 0, True),
        (lambda rank=0, world_size=1: 0, True),
        (lambda rank, world_size, lr=0.1: 0, True),
        (lambda rank, world_size, *, lr=0.1: 0, True),
        (lambda lr=0.1: 0, False),
        (lambda lr=0.1, momentum=0.9: 0, False),
        (lambda *, lr=0.1: 0, False),
        (lambda *args: 0, False),
        (lambda rank, *args: 0, True),
        (lambda **options: 0, False),
    ],
)
def test_a_signature_tells_how_it_is_called(
    function: Callable[..., Any], expected: bool
) -> None:
    assert takes_rank(function) is expected
    function(*((0, 1) if expected else ()))


@pytest.mark.parametrize(
    "function",
    [
        lambda rank: 0,
        lambda rank, world_size, lr: 0,
        lambda *, rank, world_size: 0,
        lambda rank, world_size, *, lr: 0,
    ],
)
def test_a_function_that_cannot_be_called_is_explained(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(ValueError, match=r"is called as f\(\) or f\(rank, world_size"):
        takes_rank(function)


def test_an_explanation_names_the_function_and_its_parameters() -> None:
    def train(rank: Any, world_size: Any, lr: Any) -> None: ...

    with pytest.raises(ValueError, match=r"train\(rank.*lr.*default values"):
        takes_rank(train)


# ---- what goes along ----


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("def f(): return 42", "42"),
        ("def double(x): return 2 * x\ndef f(): return double(21)", "42"),
        (
            "def even(n): return n == 0 or odd(n - 1)\n"
            "def odd(n): return n != 0 and even(n - 1)\n"
            "def f(): return even(10)",
            "True",
        ),
        ("import math\nDEGREES = 180\ndef f(): return DEGREES / math.pi > 57", "True"),
        (
            "class Base:\n"
            "    factor = 2\n"
            "class Scale(Base):\n"
            "    def __call__(self, x): return super().__getattribute__('factor') * x\n"
            "def f(): return Scale()(21)",
            "42",
        ),
        (
            "from dataclasses import dataclass\n"
            "@dataclass(frozen=True)\n"
            "class Config:\n"
            "    lr: float = 0.1\n"
            "config = Config(lr=0.5)\n"
            "def f(): return config",
            "Config(lr=0.5)",
        ),
        (
            "def make(n):\n"
            "    count = [n]\n"
            "    def f():\n"
            "        count[0] += 1\n"
            "        return count[0]\n"
            "    return f\n"
            "f = make(41)",
            "42",
        ),
        ("def f(n=5): return 1 if n == 0 else n * f(n - 1)", "120"),
        ("f = lambda: [square for square in (n * n for n in range(3))]", "[0, 1, 4]"),
    ],
    ids=[
        "nothing",
        "helper",
        "helpers of each other",
        "module and constant",
        "classes",
        "instance",
        "closure",
        "recursion",
        "lambda",
    ],
)
def test_a_function_takes_what_it_refers_to_along(
    source: str, result: str, tmp_path: Path
) -> None:
    payload, _, _ = pack_function(in_notebook(source)["f"])
    assert call_elsewhere(payload, tmp_path) == f"{result} False"


def test_a_model_class_of_the_notebook_goes_along(tmp_path: Path) -> None:
    names = in_notebook(
        """
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(2, 1)

            def forward(self, x):
                return self.inner(x)

        model = Model()
        nn.init.ones_(model.inner.weight)
        nn.init.zeros_(model.inner.bias)

        def f():
            return model(torch.tensor([20.0, 22.0])).item()
        """
    )
    payload, _, _ = pack_function(names["f"])
    assert call_elsewhere(payload, tmp_path) == "42.0 True"


def test_the_function_itself_is_not_changed() -> None:
    names = in_notebook("x = [1]\ndef f(): x.append(2); return x")
    copy = serialization.loads(pack_function(names["f"])[0])
    assert copy() == [1, 2]
    assert names["x"] == [1]


@pytest.mark.parametrize(
    "make",
    [threading.Lock, lambda: (n for n in range(3)), lambda: sys._getframe()],
    ids=["lock", "generator", "frame"],
)
def test_a_function_that_cannot_travel_is_explained(make: Callable[[], Any]) -> None:
    thing = make()

    def train() -> Any:
        return thing

    with pytest.raises(
        ValueError, match=r"cannot be sent to another process.*make it there"
    ):
        pack_function(train)


def test_with_rank_travels_beside_the_function() -> None:
    assert pack_function(lambda: 0)[1] is False
    assert pack_function(lambda rank, world_size: 0)[1] is True


# ---- values ----


def round_trip(value: Any) -> Any:
    return serialization.loads(serialization.dumps(value))


@pytest.mark.parametrize("kind", [torch.Tensor.detach, nn.Parameter])
def test_a_view_travels_without_the_rest_of_its_storage(
    kind: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    view = kind(torch.randn(1000, 100)[2:4])
    sent = serialization.dumps([view, view])
    assert len(sent) < 2 * view.numel() * view.element_size()
    first, second = serialization.loads(sent)
    assert first is second
    assert torch.equal(first, view)
    assert type(first) is type(view)
    assert first.requires_grad == view.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.ones(2, requires_grad=True),
        torch.arange(6).reshape(2, 3).T,
    ],
    ids=["integers", "bfloat16", "empty", "requires_grad", "transposed"],
)
def test_cpu_tensors_come_back_as_they_were(tensor: torch.Tensor) -> None:
    copy = round_trip(tensor)
    torch.testing.assert_close(copy, tensor, rtol=0, atol=0)
    assert copy.requires_grad == tensor.requires_grad
    assert copy.stride() == tensor.stride()


def test_a_module_comes_back_ready_to_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    copy = round_trip(model)
    torch.testing.assert_close(copy.state_dict(), model.state_dict())
    assert all(type(each) is nn.Parameter for each in copy.parameters())
    x = torch.randn(5, 3)
    torch.testing.assert_close(copy(x), model(x))
    copy(x).sum().backward()
    assert copy[0].weight.grad is not None


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    copy = round_trip(model)
    assert copy[1].weight is copy[0].weight


def test_an_optimizer_stays_with_its_model() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = round_trip((model, optimizer))
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.1)


def test_a_wrapped_model_comes_back_plain() -> None:
    model = nn.Linear(3, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        copy = round_trip({"model": DistributedDataParallel(model)})["model"]
    finally:
        dist.destroy_process_group()
    assert type(copy) is nn.Linear
    torch.testing.assert_close(copy.state_dict(), model.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_model_of_a_gpu_comes_back_on_the_cpu_ready_to_train() -> None:
    model = nn.Linear(3, 1).cuda()
    model.bias.requires_grad_(False)
    copy = round_trip(model)
    assert [type(each) for each in copy.parameters()] == [nn.Parameter] * 2
    assert {each.device.type for each in copy.parameters()} == {"cpu"}
    assert copy.weight.requires_grad
    assert not copy.bias.requires_grad
