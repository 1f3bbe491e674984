"""Gradients are kept for the next step, which goes by what has changed in them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

before = None
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        now = [p.grad for p in model.parameters()]
        for p, gradient, old in zip(model.parameters(), now, before or now):
            p.grad = gradient + 0.5 * (gradient - old)
        before = now
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
