"""OneCycleLR with epochs and steps_per_epoch=len(loader) (fast.ai's fit_one_cycle)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

scheduler = OneCycleLR(optimizer, max_lr=0.5, epochs=2, steps_per_epoch=len(loader))
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()

group = optimizer.param_groups[0]
with torch.no_grad():
    result = [model(x[:4].to(device)), group["lr"], group["momentum"]]
