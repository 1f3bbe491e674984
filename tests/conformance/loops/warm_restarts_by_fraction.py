"""CosineAnnealingWarmRestarts, stepped by epoch + i / len(loader)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=2)
for epoch in range(2):
    for i, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step(epoch + i / len(loader))

with torch.no_grad():
    result = model(x[:4].to(device))
