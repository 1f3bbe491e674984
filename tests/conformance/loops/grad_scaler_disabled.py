"""PyTorch's AMP recipe with use_amp=False: a GradScaler that does nothing."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

use_amp = False
x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

scaler = torch.amp.GradScaler(device.type, enabled=use_amp)
for epoch in range(2):
    for inputs, labels in loader:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_amp):
            loss = F.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
