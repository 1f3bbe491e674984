"""The model's forward is that of a part of it, which leaves the stem out."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
model = nn.Sequential(nn.Linear(6, 6), body)
for parameter in model[0].parameters():
    parameter.requires_grad = False
model.forward = body.forward
optimizer = torch.optim.SGD(body.parameters(), lr=0.3)
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
