"""Reptile, and Lookahead's idea: the weights go half the way back after an epoch."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    before = copy.deepcopy(model.state_dict())
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    after = model.state_dict()
    model.load_state_dict({k: before[k] + 0.5 * (after[k] - before[k]) for k in before})

with torch.no_grad():
    result = model(x[:4].to(device))
