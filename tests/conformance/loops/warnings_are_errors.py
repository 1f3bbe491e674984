"""Warnings are errors (warnings.simplefilter), and the loop is careful to have none."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    model, optimizer, loader = prepare(
        model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
    )
    for epoch in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
