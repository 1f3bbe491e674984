"""Gradient descent on all samples: one loss of a whole pass, by len(loader.dataset)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(5):
    total = 0
    for inputs, labels in loader:
        total = total + F.cross_entropy(model(inputs), labels, reduction="sum")
    optimizer.zero_grad()
    (total / len(loader.dataset)).backward()
    optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
