"""Functions are defined as a notebook does it, and called in another process."""

import math
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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


def test_tensors_over_the_same_memory_stay_so() -> None:
    weight = torch.randn(200, 100)
    tied = nn.Sequential(nn.Linear(100, 200), nn.Linear(100, 200))
    tied[1].weight = tied[0].weight
    array = np.zeros(2**14)
    values = {
        "as rows": [weight, weight.view(-1), weight.T],
        "a part": [weight[1:3], weight[1:3]],
        "tied": [tied.state_dict()[f"{n}.weight"] for n in range(2)],
        "of an array": [torch.from_numpy(array), torch.from_numpy(array)],
    }
    sent = serialization.dumps(values)
    assert len(sent) < 2 * weight.nbytes + array.nbytes + 20_000
    found = serialization.loads(sent)
    for name, (first, *others) in found.items():
        for copy, original in zip(found[name], values[name], strict=True):
            assert torch.equal(copy, original), name
        for other in others:
            assert other.data_ptr() == first.data_ptr(), name
    of_one = torch.from_numpy(array), torch.from_numpy(array[:9])
    assert [len(each) for each in round_trip(of_one)] == [2**14, 9]


def test_memory_of_what_is_made_while_pickling_is_nobody_elses() -> None:
    class Passing:
        def __init__(self, number: int) -> None:
            self.number = number

        def __reduce__(self) -> Any:  # its tensor is gone in a moment
            return list, (torch.full((20_000,), self.number),)

    found = round_trip([Passing(number) for number in range(20)])
    assert [each[0] for each in found] == [*range(20)]


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


def large(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """More than what goes within a pickle."""
    assert math.prod(size) * dtype.itemsize > serialization.LARGE_BYTES
    return torch.randn(size).to(dtype)


LARGE_TENSORS = {
    "plain": lambda: large(200, 100),
    "bfloat16": lambda: large(400, 200, dtype=torch.bfloat16),
    "transposed": lambda: large(200, 100).T,
    "channels_last": lambda: large(8, 3, 40, 40).to(memory_format=torch.channels_last),
    "a view": lambda: large(400, 100)[10:390, ::2],
    "expanded": lambda: torch.randn(20_000, 1).expand(20_000, 3),
    "requires_grad": lambda: large(200, 100).requires_grad_(),
    "with a history": lambda: large(200, 100).requires_grad_() * 2,
    "parameter": lambda: nn.Parameter(large(200, 100)),
    "frozen": lambda: nn.Parameter(large(200, 100), requires_grad=False),
    "conjugate": lambda: torch.randn(9999, dtype=torch.complex64).conj(),
    "sparse": lambda: large(200, 100).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(
        large(400, 300), 0.1, 0, torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore:torch.quantize")
@pytest.mark.parametrize("kind", LARGE_TENSORS)
def test_large_tensors_come_back_as_they_were(kind: str) -> None:
    tensor = LARGE_TENSORS[kind]()
    copy, again = round_trip([tensor, tensor])
    assert copy is again
    assert type(copy) is type(tensor)
    assert (copy.dtype, copy.requires_grad) == (tensor.dtype, tensor.requires_grad)
    if tensor.is_quantized:
        assert torch.equal(copy.dequantize(), tensor.dequantize())
        return
    assert torch.equal(copy.to_dense(), tensor.to_dense())
    if not tensor.is_sparse:
        assert copy.stride() == (
            tensor.clone().stride() if kind == "a view" else tensor.stride()
        )
    with torch.no_grad():
        copy.mul_(2) if kind != "expanded" else copy.contiguous()


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.bool])
def test_tensors_of_all_dtypes_travel(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randint(2, (size,)).to(dtype)
    copy = round_trip(tensor)
    assert copy.dtype == dtype
    assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8))


def test_nested_tensors_travel() -> None:
    parts = [large(200, 100), large(300, 100)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype
        copy = round_trip(torch.nested.nested_tensor(parts))
    assert all(map(torch.equal, copy.unbind(), parts))


def test_a_default_device_does_not_count() -> None:
    tensor = large(200, 100)
    sent = serialization.dumps(tensor)
    torch.set_default_device("meta")
    try:
        copy = serialization.loads(sent)
    finally:
        torch.set_default_device(None)
    assert torch.equal(copy, tensor)


def test_a_large_tensor_keeps_its_attributes() -> None:
    tensor = large(200, 100)
    tensor.note = "kept"
    assert round_trip(tensor).note == "kept"


def test_a_large_tensor_can_be_resized() -> None:
    tensor = large(200, 100)
    for each in (round_trip(tensor), tensor):
        each.resize_(400, 100)


ARRAYS = {
    "rows": lambda: np.random.rand(200, 100),
    "columns": lambda: np.asfortranarray(np.random.rand(200, 100)),
    "apart": lambda: np.random.rand(200, 200)[:, ::2],
    "dates": lambda: np.arange(20_000).astype("datetime64[s]"),
    "records": lambda: np.zeros(20_000, dtype=[("x", "f8"), ("y", "i4")]),
    "objects": lambda: np.array([{"x": n} for n in range(20_000)]),
    "small": lambda: np.arange(3),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_come_back_as_they_were_and_can_be_written_to(kind: str) -> None:
    array = ARRAYS[kind]()
    copy, again = round_trip([array, array])
    assert copy is again
    assert copy.dtype == array.dtype
    assert np.array_equal(copy, array)
    copy[0] = copy[1]


def test_what_is_read_only_stays_so() -> None:
    array = np.random.rand(200, 100)
    array.flags.writeable = False
    copy = round_trip(array)
    assert np.array_equal(copy, array)
    assert not copy.flags.writeable


def test_a_table_comes_back_and_can_be_written_to() -> None:
    table = pd.DataFrame({"x": np.random.rand(20_000), "name": "a"})
    copy = round_trip(table)
    pd.testing.assert_frame_equal(copy, table)
    copy.loc[0, "x"] = 2.0


def test_memory_of_others_does_not_keep_a_file_open() -> None:
    """pyarrow, which pandas has strings in, would use it as it is."""
    table = pd.DataFrame({"name": [f"sample {n}" for n in range(20_000)]})
    assert len(serialization.pickled(table["name"].str.upper()).parts) == 2


def test_what_is_large_is_not_copied_to_be_sent() -> None:
    tensor, array = large(200, 100), np.random.rand(200, 100)
    _, _, *memory = serialization.pickled({"tensor": tensor, "array": array}).parts
    sent = [np.frombuffer(part, np.uint8).ctypes.data for part in memory]
    assert sent == [tensor.data_ptr(), array.ctypes.data]


def test_what_is_received_has_memory_of_its_own() -> None:
    """That of a file, which all ranks map, would stay as long as any of it is used."""
    sent = bytearray(serialization.dumps([large(200, 100), np.random.rand(200, 100)]))
    tensor, array = serialization.loads(sent)
    before = tensor.clone(), array.copy()
    sent[:] = bytes(len(sent))
    assert torch.equal(tensor, before[0])
    assert np.array_equal(array, before[1])


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
