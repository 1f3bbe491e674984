"""A learning rate that falls with the number of samples that the loop has had."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)


def rate(count):
    return 0.3 / (1 + count / 8)


seen = 0
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        lr = rate(seen)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        seen += len(inputs)

with torch.no_grad():
    result = model(x[:4].to(device))
