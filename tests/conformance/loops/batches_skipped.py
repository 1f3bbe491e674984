"""A batch without a positive label is skipped."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(48, 6)
y = (x[:, 0] > 0).float()
y[8:12] = 0
y[28:32] = 0
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for inputs, labels in loader:
    if labels.sum() == 0:
        continue
    optimizer.zero_grad()
    F.mse_loss(model(inputs).squeeze(1), labels).backward()
    optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
