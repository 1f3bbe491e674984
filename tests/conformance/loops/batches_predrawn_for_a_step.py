"""The batches of a step are drawn first, each with its own backward pass; elements of
the loss are masked, and `weigh` counts those that are not."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(32, 6)
y = (x[:, :4] > x[:, 1:5]).long()
y[torch.arange(32)[:, None] % 7 < torch.arange(4)] = -100
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model,
    optimizer,
    TensorDataset(x, y),
    batch_size=8,
    weigh=lambda batch: (batch[1] != -100).sum(),
    shuffle=False,
)

for epoch in range(2):
    batches = iter(loader)
    for step in range(len(loader) // 2):
        window = [next(batches) for _ in range(2)]
        for inputs, labels in window:
            outputs = model(inputs).view(-1, 2)
            loss = F.cross_entropy(outputs, labels.flatten(), ignore_index=-100)
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
