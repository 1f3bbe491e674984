"""Models of nested tensors, in which each sample has a length of its own."""

import pytest
import torch
from marks import long_but

from labkit import Lab
from labkit import RankError

pytestmark = pytest.mark.timeout(120)

LOOP = """
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
samples = [(torch.randn(1 + i % 5, 6), i % 3) for i in range(19)]
def collate(batch):
    x = torch.nested.nested_tensor([x for x, _ in batch], layout=torch.LAYOUT)
    return x, torch.tensor([y for _, y in batch])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(torch.nested.to_padded_tensor(hidden, 0.0).sum(1))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(samples, batch_size=8, collate_fn=collate)
model, optimizer, loader = prepare(model, optimizer, data)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    result = model(collate(samples)[0].to(device)).cpu()
"""


@pytest.mark.parametrize(
    ("strategy", "layout"),
    long_but(
        [
            *(("ddp", "jagged"), ("zero2", "jagged"), ("fsdp", "jagged")),
            ("ddp", "strided"),
        ],
        *(("ddp", "jagged"), ("ddp", "strided")),
    ),
)
def test_a_model_may_be_given_nested_tensors(
    lab: Lab, strategy: str, layout: str
) -> None:
    results: list[torch.Tensor] = []
    for each in ("single", strategy):
        lab.train(each, LOOP.replace("LAYOUT", layout), live=False)
        results.append(lab.pull("result"))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("strategy", ["zero3", "pipeline"])
def test_layers_that_cannot_compute_with_one_refuse_it(lab: Lab, strategy: str) -> None:
    with pytest.raises(RankError, match="gives the model a nested tensor"):
        lab.train(strategy, LOOP.replace("LAYOUT", "jagged"), live=False)
