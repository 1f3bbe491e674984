"""torch.func's ensemble tutorial: three nets in one, by vmap over stacked weights."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()


class Ensemble(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        nets = [nn.Linear(6, 2) for _ in range(size)]
        self.weight = nn.Parameter(torch.stack([n.weight.detach() for n in nets]))
        self.bias = nn.Parameter(torch.stack([n.bias.detach() for n in nets]))

    def forward(self, x):
        def one(weight, bias):
            return F.linear(x, weight, bias)

        return torch.vmap(one)(self.weight, self.bias).mean(0)


model = Ensemble()
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
