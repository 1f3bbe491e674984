"""A model is frozen but for what one optimizer has, as Lightning toggles optimizers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def toggle(optimizer, model):
    ours = {p for group in optimizer.param_groups for p in group["params"]}
    for p in model.parameters():
        p.requires_grad_(p in ours)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        toggle(optimizer, model)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
