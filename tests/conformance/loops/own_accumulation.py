"""Hugging Face's guide to training on one GPU: a step every second batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

accumulation_steps = 2
x = torch.randn(32, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    optimizer.zero_grad()
    for i, (inputs, labels) in enumerate(loader):
        loss = F.cross_entropy(model(inputs), labels) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
