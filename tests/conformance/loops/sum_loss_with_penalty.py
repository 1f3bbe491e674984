"""A sum over the samples, and a ridge penalty beside it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = x.sin() @ torch.randn(6, 3)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = prepare(
    model,
    optimizer,
    TensorDataset(x, y),
    batch_size=8,
    shuffle=False,
    reduction="sum",
)

for epoch in range(2):
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets, reduction="sum")
        loss = loss + 0.5 * sum(p.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
