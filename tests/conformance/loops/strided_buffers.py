"""Buffers that are views with a stride, as frequencies of rotary embeddings are."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(32, 6)
y = (x[:, 0] > x[:, 1]).long()


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1, 12)[::2])
        self.register_buffer("ones", torch.ones(1).expand(6))
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.second(self.first((x * self.frequencies).cos() * self.ones).relu())


model = Rotary()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
