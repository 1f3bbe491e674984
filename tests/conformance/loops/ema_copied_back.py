"""An EMA of the weights that is copied back into the model after every epoch."""

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

averages = [p.detach().clone() for p in model.parameters()]
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(averages, model.parameters()):
                average.lerp_(p, 0.3)
    with torch.no_grad():
        for average, p in zip(averages, model.parameters()):
            p.copy_(average)

with torch.no_grad():
    result = model(x[:4].to(device))
