"""A scheduler made before prepare, of the optimizer as it was then."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

x = torch.randn(16, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = MultiStepLR(optimizer, milestones=[1, 2], gamma=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(3):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    scheduler.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), optimizer.param_groups[0]["lr"]]
