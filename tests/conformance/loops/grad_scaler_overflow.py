"""A GradScaler whose first scale is too large for half of one layer's gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = 3 * x @ torch.randn(6, 2)

model = nn.Sequential(
    nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)
)
with torch.no_grad():
    model[0].weight[:8] *= 2.0**10
    model[2].weight[:, :8] *= 2.0**-12
steep = [model[2].weight]
others = [p for p in model.parameters() if p is not model[2].weight]
optimizer = torch.optim.SGD(
    [{"params": steep, "lr": 2.0**-22}, {"params": others}], 0.05
)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

scaler = torch.amp.GradScaler(device.type, init_scale=2.0**123, backoff_factor=2.0**-20)
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

with torch.no_grad():
    result = model(x[:4].to(device))
