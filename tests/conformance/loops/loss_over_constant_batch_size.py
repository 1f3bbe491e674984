"""A summed loss, divided by the batch size that the script begins with."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 8

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels, reduction="sum") / BATCH_SIZE
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
