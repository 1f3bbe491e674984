"""Validation after every epoch, with accuracy, on all ranks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
val_x = torch.randn(12, 6).to(device)
val_y = (val_x[:, 0] > val_x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

history = []
for epoch in range(2):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        history.append(F.cross_entropy(model(val_x), val_y))

with torch.no_grad():
    result = [model(x[:4].to(device)), torch.stack(history)]
