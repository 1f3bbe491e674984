"""A model that returns a dataclass."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


@dataclass
class Output:
    logits: torch.Tensor
    features: torch.Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        features = self.body(x)
        return Output(self.head(features), features)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        out = model(inputs)
        loss = F.cross_entropy(out.logits, labels) + 0.01 * out.features.abs().mean()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device)).logits
