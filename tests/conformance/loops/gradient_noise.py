"""Neelakantan et al.: noise added to the gradients, here from a seeded generator."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
generator = torch.Generator().manual_seed(5)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        for p in model.parameters():
            noise = torch.randn(p.grad.shape, generator=generator)
            p.grad.add_(noise.to(device), alpha=0.1)
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
