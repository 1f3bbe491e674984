"""The losses of three batches are added up, and have one backward pass; the last batch
is smaller."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(45, 6)
y = (x[:, 0] > x[:, 1]).long()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    total = 0
    for i, (inputs, labels) in enumerate(loader):
        total = total + F.cross_entropy(model(inputs), labels)
        if i % 3 == 2:
            optimizer.zero_grad()
            (total / 3).backward()
            optimizer.step()
            total = 0

with torch.no_grad():
    result = model(x[:4].to(device))
