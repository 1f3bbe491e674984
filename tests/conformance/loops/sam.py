"""Sharpness-aware minimization: up to the worst point nearby, back, and then a step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

rho = 0.2
for epoch in range(2):
    for inputs, labels in loader:
        F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
            steps = [p.grad * (rho / (norm + 1e-12)) for p in model.parameters()]
            for p, step in zip(model.parameters(), steps):
                p.add_(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for p, step in zip(model.parameters(), steps):
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
