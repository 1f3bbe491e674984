"""nanoGPT sets the rate itself, by the number of the iteration."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

iteration, total = 0, 2 * len(loader)
for epoch in range(2):
    for inputs, labels in loader:
        lr = 0.25 * (1 + math.cos(math.pi * iteration / total))
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        iteration += 1

with torch.no_grad():
    result = model(x[:4].to(device))
