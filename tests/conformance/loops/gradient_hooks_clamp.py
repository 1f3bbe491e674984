"""Gradients clamped by a hook on every parameter (p.register_hook)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = 3 * x @ torch.randn(6, 2)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
for p in model.parameters():
    p.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
