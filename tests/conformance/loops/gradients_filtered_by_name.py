"""Grokfast: an average of each parameter's gradients, by its name, is added to them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)


def filtered(model, averages=None, alpha=0.8, lamb=2.0):
    trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
    if averages is None:
        averages = {name: p.grad.data.detach() for name, p in trained.items()}
    for name, p in trained.items():
        averages[name] = averages[name] * alpha + p.grad.data.detach() * (1 - alpha)
        p.grad.data = p.grad.data + averages[name] * lamb
    return averages


averages = None
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        averages = filtered(model, averages)
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
