"""Weights in a ParameterDict and a ParameterList, used by name."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ParameterDict(
            {"small": torch.randn(6, 4) * 0.4, "large": torch.randn(6, 12) * 0.4}
        )
        self.scales = nn.ParameterList([torch.ones(1) for _ in range(2)])
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        parts = [x @ self.heads[name] for name in ("small", "large")]
        parts = [s * torch.tanh(p) for s, p in zip(self.scales, parts)]
        return self.out(torch.cat(parts, dim=1))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
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
