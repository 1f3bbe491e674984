"""CosineAnnealingLR over epochs * len(loader), a step with every batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

epochs = 2
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader), eta_min=0.01)
for epoch in range(epochs):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), scheduler.get_last_lr()[0]]
