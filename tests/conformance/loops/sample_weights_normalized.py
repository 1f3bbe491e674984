"""Importance weights, brought to a mean of 1 over the batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
importance = torch.rand(24) + 0.1

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y, importance), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels, weights in loader:
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        loss = (losses * (weights / weights.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
