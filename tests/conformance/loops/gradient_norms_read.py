"""A gradient-flow plot: the norm of every parameter's gradient is looked at."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

total_norms = []
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        total_norm = 0.0
        for p in model.parameters():
            total_norm += p.grad.detach().norm(2).item() ** 2
        total_norms.append(total_norm**0.5)
        optimizer.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), torch.tensor(total_norms[0])]
