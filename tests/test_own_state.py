"""What a model's forward keeps, counts and draws from is not labkit's to use up."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from test_strategies import pull_weights
from test_strategies import train
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.strategies.own_state import unchanged

pytestmark = pytest.mark.timeout(120)

LOOP = """
import collections, dataclasses, itertools, random, types
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
x = torch.rand(32, 6)
target = x[:, :3].argmax(1)
generator = torch.Generator().manual_seed(5)
rng, numpy_rng = random.Random(3), np.random.default_rng(3)
calls, num_calls = [], 0
array, total = np.zeros(1), torch.zeros(1)
numbers, drawn = itertools.count(1), (each for each in range(1, 99))

class Table(dict):
    pass

@dataclasses.dataclass(slots=True)
class Slot:
    n: int = 0

def noise():
    return torch.randn(1, 6, generator=generator)

class Net(nn.Module):
    num = 0

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.generator = torch.Generator().manual_seed(5)
        self.counts, self.last = collections.Counter(), collections.deque(maxlen=9)
        self.center = torch.zeros(6)
        self.table, self.slot = Table(n=0), Slot()
        self.names = types.SimpleNamespace(n=0)
        self.stats = {"n": torch.zeros(1)}
        self.register_buffer("mean", None)

    def forward(self, x):
        global num_calls
        {line}
        return self.second(torch.tanh(self.first(x)))

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
data = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x, target), batch_size=16
)
model, optimizer, loader = prepare(model, optimizer, data)
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
"""
SPLIT = {"plan": {"first": "colwise", "second": "rowwise"}}
LINES = {
    "a generator": "x = x + noise()",
    "a module's generator": "x = x + torch.randn(1, 6, generator=self.generator)",
    "random": "x = x * rng.randint(1, 9)",
    "numpy": "x = x + numpy_rng.random()",
    "a list": "calls.append(1); x = x * len(calls)",
    "a global number": "num_calls += 1; x = x * num_calls",
    "a number of the class": "Net.num += 1; x = x * Net.num",
    "a counter": "self.counts['n'] += 1; x = x * self.counts['n']",
    "a deque": "self.last.append(1); x = x * len(self.last)",
    "a tensor": "self.center += 1; x = x + self.center",
    "a dict of one's own": "self.table['n'] += 1; x = x * self.table['n']",
    "a slot": "self.slot.n += 1; x = x * self.slot.n",
    "a namespace": "self.names.n += 1; x = x * self.names.n",
    "an array": "array[0] += 1; x = x * array.item()",
    "a tensor in a dict": "self.stats['n'] += 1; x = x * self.stats['n'].item()",
    "a global tensor": "total.add_(1); x = x * total.item()",
    "an iterator": "x = x * next(numbers)",
    "a generator function": "x = x * next(drawn)",
    "a buffer of the first call": (
        "self.mean = torch.ones(6) if self.mean is None else self.mean + 1; "
        "x = x * self.mean"
    ),
}


def test_a_generator_of_several_stages_is_refused(lab: Lab) -> None:
    code = LOOP.replace("{line}", "h = self.third(self.first(x))")
    code = code.replace("torch.tanh(self.first(x))", "h").replace(
        "        self.generator =",
        "        self.third = Block()\n        self.generator =",
    )
    block = """
class Block(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
    def forward(self, x):
        return super().forward(x + noise())

class Net("""
    code = code.replace("\nclass Net(", block)
    train(lab, "pipeline", code)
    with pytest.raises(RankError, match="layers of several stages draw from one gen"):
        train(lab, "pipeline", code.replace("nn.Linear(6, 6), ", "Block(), "))
    with pytest.raises(RankError, match="layers of several stages draw from one gen"):
        train(lab, "pipeline", code.replace("(h)", "(h + noise())"))


SHARED = {
    "a list": "self.shared.calls.append(1); x = x * len(self.shared.calls)",
    "a global number": "global num_calls; num_calls += 1; x = x * num_calls",
    "a number of the class": "Block.num += 1; x = x * Block.num",
    "an attribute": "self.shared.num += 1; x = x * self.shared.num",
    "what another has left": (
        "x = x + self.shared.sums.get('last', 0.0); self.shared.sums['last'] = 1.0"
    ),
}
BLOCKS = """
class Block(nn.Linear):
    num = 0

    def __init__(self, shared):
        super().__init__(6, 6)
        self.shared = shared
        self.own = 0

    def forward(self, x):
        {line}
        return super().forward(x)

class Net("""


MADE = """self.shared = types.SimpleNamespace(num=0, calls=[], sums={})
        self.blocks = nn.ModuleList(Block(self.shared) for _ in range(4))
        self.second = nn.Linear(6, 3)"""


def in_blocks(line: str) -> str:
    """The loop with a model of four blocks, which its forward calls in `line`."""
    code = LOOP.replace("{line}", line).replace("\nclass Net(", BLOCKS)
    made = "self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)"
    return code.replace(made, MADE).replace("self.first(x)", "x")


@pytest.mark.parametrize("what", SHARED)
def test_what_layers_of_several_stages_change_is_refused(lab: Lab, what: str) -> None:
    code = in_blocks("for block in self.blocks: x = block(x)")
    with pytest.raises(
        RankError, match=r"blocks\.0 changes what layers of other stages"
    ):
        train(lab, "pipeline", code.replace("{line}", SHARED[what]))
    train(lab, "pipeline", code.replace("{line}", "self.own += 1; x = x * self.own"))


def test_what_the_forward_around_the_layers_changes_is_not(lab: Lab) -> None:
    code = in_blocks("self.shared.num += 1\n        for b in self.blocks: x = b(x)")
    code = code.replace("{line}", "x = x * self.shared.num")
    names: dict[str, Any] = {"prepare": lambda *given: given}
    exec(code, names)
    expected = names["model"].state_dict()
    train(lab, "pipeline", code)
    weights = pull_weights(lab, "pipeline")
    weights = {n: w for n, w in weights.items() if n in expected}
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
@pytest.mark.parametrize("what", LINES)
def test_trials_leave_it_to_the_loop(lab: Lab, what: str, strategy: str) -> None:
    code = LOOP.replace("{line}", LINES[what])
    names: dict[str, Any] = {"prepare": lambda *given: given}
    exec(code, names)
    expected = names["model"].state_dict()
    config = SPLIT if strategy == "tensor" else {}
    train(lab, strategy, code, config=config)
    weights = pull_weights(lab, strategy)
    weights = {n: w for n, w in weights.items() if n in expected}
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


class Made(dict[str, Any]):
    """A table that makes what it gives, as transformers' of activations."""

    def __getitem__(self, name: str) -> Any:
        return [super().__getitem__(name)]


def test_a_table_that_makes_what_it_gives_stays_as_it_is() -> None:
    model = nn.Linear(1, 1)
    model.table = Made(gelu="a class")
    with unchanged(model) as state:
        assert not state.has_changed()
    assert dict.__getitem__(model.table, "gelu") == "a class"


def test_objects_of_the_loops_own_modules_are_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = {name: ModuleType(name) for name in ("my_helpers", "my_library")}
    modules["my_library"].__file__ = "/venv/lib/site-packages/my_library.py"
    model = nn.Linear(1, 1)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        kind = type("Count", (), {"__module__": name, "n": 0})
        setattr(model, name, kind())
    with unchanged(model):
        model.my_helpers.n = model.my_library.n = 1
    assert (model.my_helpers.n, model.my_library.n) == (0, 1)


def test_tensors_in_a_tuple_are_compared() -> None:
    model = nn.Linear(1, 1)
    model.state = torch.zeros(2), torch.zeros(2)
    with unchanged(model) as state:
        model.state = torch.zeros(2), torch.zeros(2)
        assert not state.has_changed()
        model.state = torch.zeros(2), torch.ones(2)
        assert state.has_changed()
    assert not model.state[1].any()


def test_what_torch_func_has_wrapped_is_left_alone() -> None:
    class Tried(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with unchanged(self):
                return super().forward(x)

    model = Tried(1, 1)

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, given, torch.ones(1)).sum()

    found = torch.func.grad(loss)(dict(model.named_parameters()))
    assert found["weight"].item() == 1.0
