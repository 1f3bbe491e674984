"""StepLR, once an epoch, as PyTorch's MNIST example has it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

x = torch.randn(16, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(3):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    scheduler.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), scheduler.get_last_lr()[0]]
