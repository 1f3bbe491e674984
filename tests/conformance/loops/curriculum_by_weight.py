"""Each sample's loss is weighted, and the weights change with the epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
difficulty = torch.rand(24)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y, difficulty), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels, difficult in loader:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        loss = (losses * (1 - difficult * (1 - epoch))).mean()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
