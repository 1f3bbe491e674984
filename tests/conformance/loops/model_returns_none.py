"""A model whose outputs are a namedtuple with None where no labels were given."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()


class Output(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor
    hidden: tuple | None = None


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x, labels=None, keep=False):
        hidden = torch.relu(self.body(x))
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss, logits, (hidden,) if keep else None)


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        output = model(inputs, labels, keep=True)
        loss = output.loss + 0.01 * output.hidden[0].abs().mean()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device)).logits
