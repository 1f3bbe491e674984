"""A GradScaler, and gradients that the loop reads and sets before they are unscaled."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = 3 * x @ torch.randn(6, 2)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        for parameter in model.parameters():
            parameter.grad = torch.nan_to_num(parameter.grad)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

with torch.no_grad():
    result = model(x[:4].to(device))
