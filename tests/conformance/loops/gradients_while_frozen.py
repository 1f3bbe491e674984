"""Gradients that the loop reads and sets while it has frozen their parameters."""

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

for inputs, labels in loader:
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    model[0].requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    model[0].requires_grad_(True)
    optimizer.step()
    optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
