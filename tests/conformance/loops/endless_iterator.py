"""Steps, not epochs: an iterator over the loader that begins again when it ends."""

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


def forever(loader):
    while True:
        yield from loader


num_epochs = 2
batches = forever(loader)
for step in range(num_epochs * len(loader)):
    inputs, labels = next(batches)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
