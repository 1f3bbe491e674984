"""Lottery tickets: small weights are pruned, and the others go back to the start."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
first = copy.deepcopy(model.state_dict())
masks = {n: torch.ones_like(p).to(device) for n, p in model.named_parameters()}
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for ticket in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        for name, p in model.named_parameters():
            none = torch.zeros_like(p.grad)
            p.grad.data = torch.where(masks[name] == 0, none, p.grad.data)
        optimizer.step()
    if ticket == 0:
        for name, p in model.named_parameters():
            limit = p.data[masks[name] != 0].abs().quantile(0.3)
            masks[name] = masks[name] * (p.data.abs() >= limit)
            p.data = masks[name] * first[name].to(p.device)

with torch.no_grad():
    result = model(x[:4].to(device))
