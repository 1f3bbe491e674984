"""nanoGPT's loop: `for step in range(max_steps)`, whatever the loader's length."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

max_steps = 4
x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

iterator = iter(loader)
for step in range(max_steps):
    try:
        inputs, labels = next(iterator)
    except StopIteration:
        iterator = iter(loader)
        inputs, labels = next(iterator)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
