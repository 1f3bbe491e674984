"""What a loop does with weights where they are gathered for forward passes alone."""

from textwrap import dedent
from textwrap import indent

import pytest
import torch
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.notebook.runs.run import Run

pytestmark = pytest.mark.timeout(120)

SET_UP = """
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
random = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(16, 6, generator=random), torch.randint(0, 2, (16,), generator=random)
)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(2))
    def forward(self, x):
        return self.head(torch.tanh(self.fc(x)))
"""
PREPARE = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
"""


def train(lab: Lab, strategy: str, *parts: str) -> Run:
    return lab.train(strategy, "\n".join(map(dedent, parts)), live=False, timeout=60)


def test_a_loop_computes_with_a_layers_weight_under_zero3(lab: Lab) -> None:
    headless = """
    class Net(Net):
        def forward(self, x):
            return torch.tanh(self.fc(x))
    """
    loop = """
    for inputs, labels in loader:
        optimizer.zero_grad()
        hidden = model(inputs)
        logits = F.linear(hidden, model.head.weight, model.head.bias)
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
    """
    for strategy in ("ddp", "zero3"):
        train(lab, strategy, SET_UP, headless, PREPARE, loop)
        found = lab.pull("model", full=True)
        if strategy == "ddp":
            expected = found
    torch.testing.assert_close(found, expected)


MOVES = """
    model.{there}()
    model.float()
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp", "pipeline"])
def test_a_model_that_moves_and_comes_back_is_trained(lab: Lab, strategy: str) -> None:
    """As to the CPU and back, to be saved: autograd has other nodes for it then."""
    loop = "for epoch in range(2):" + MOVES
    for each, there in (("single", "float"), (strategy, "double")):
        train(lab, each, SET_UP, PREPARE, loop.format(there=there))
        found = lab.pull("model", full=True)
        if each == "single":
            expected = found
    torch.testing.assert_close(found, expected)


PARTLY_USED = """
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.body, self.mid = nn.Linear(4, 4), nn.Linear(4, 4)
            self.end = nn.Linear(4, 4)
        def forward(self, x):
            return self.mid(torch.tanh(self.body(x)))

    torch.manual_seed(0)
    partly = Partly()
    optimizer = torch.optim.SGD(partly.parameters(), lr=0.5)
    data = torch.randn(32, 4)
    partly, optimizer, loader = prepare(partly, optimizer, data, batch_size=8)
    for step, x in enumerate(loader):
        if step == 2:
            partly.mid.{there}()
            partly.mid.float()
        optimizer.zero_grad()
        partly(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_part_that_moves_and_comes_back_among_unused_ones_is_trained(
    lab: Lab, strategy: str
) -> None:
    for each, there in (("single", "float"), (strategy, "double")):
        train(lab, each, PARTLY_USED.format(there=there))
        found = lab.pull("partly", full=True)
        if each == "single":
            expected = found
    torch.testing.assert_close(found, expected)


def test_a_model_may_have_another_dtype_after_prepare_under_ddp(lab: Lab) -> None:
    loop = """
    model.double()
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.double()), labels).backward()
        optimizer.step()
    """
    for strategy in ("single", "ddp"):
        train(lab, strategy, SET_UP, PREPARE, loop)
        found = lab.pull("model", full=True)
        if strategy == "single":
            expected = found
    assert found["fc.weight"].dtype is torch.float64
    torch.testing.assert_close(found, expected)


KEEPS = {
    "an attribute": """
        def forward(self, x):
            self.last = self.fc.weight.detach()
            return super().forward(x), self.last
        """,
    "a list": """
        def forward(self, x):
            self.seen = [self.fc.weight.t()]
            return super().forward(x), self.seen[0]
        """,
    "a parameter": """
        def forward(self, x):
            self.fc.again = F.dropout(self.fc.weight, 0.0)
            return super().forward(x), self.fc.again
        """,
    "what it returns": """
        def forward(self, x):
            return super().forward(x), self.fc.weight
        """,
    "a view that it returns": """
        def forward(self, x):
            logits = super().forward(x)
            return logits, self.scale.expand_as(logits)
        """,
}
READ = """
for inputs, labels in loader:
    optimizer.zero_grad()
    logits, kept = model(inputs)
    loss = F.cross_entropy(logits, labels) + 0.01 * kept.square().mean()
    loss.backward()
    optimizer.step()
    {read}
"""


@pytest.mark.parametrize("keeps", KEEPS)
def test_fsdp_refuses_to_read_what_it_has_freed(lab: Lab, keeps: str) -> None:
    net = "class Net(Net):" + indent(KEEPS[keeps], "    ")
    with pytest.raises(RankError, match=r"fully_shard has freed that since"):
        train(lab, "fsdp", SET_UP, net, PREPARE, READ.format(read="kept[0].norm()"))


def test_what_forward_returns_of_weights_is_trained_under_fsdp(lab: Lab) -> None:
    net = "class Net(Net):" + indent(KEEPS["a view that it returns"], "    ")
    for strategy in ("ddp", "fsdp"):
        read = "shape = kept.shape"
        train(lab, strategy, SET_UP, net, PREPARE, READ.format(read=read))
        found = lab.pull("model", full=True)
        if strategy == "ddp":
            expected = found
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_weights_are_shown_and_copied_as_in_one_process(
    lab: Lab, strategy: str
) -> None:
    show = """
    import copy
    kept = copy.deepcopy(dict(model.named_parameters()))
    shown = {
        name: (p.detach().cpu().numpy().tolist(), f"{p.detach()[0].max():.4f}")
        for name, p in model.named_parameters()
    }
    for inputs, labels in loader:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    copied = {name: p.tolist() for name, p in kept.items()}
    """
    sequential = "Net = lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))"
    seed = "torch.manual_seed(1)"
    train(lab, strategy, SET_UP, seed, sequential, PREPARE, show)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    expected = {
        name: (p.tolist(), f"{p.detach()[0].max():.4f}")
        for name, p in plain.named_parameters()
    }
    for shown, copied in zip(
        lab.pull("shown", "all"), lab.pull("copied", "all"), strict=True
    ):
        assert shown == expected
        assert copied == {name: values for name, (values, _) in expected.items()}
