"""Trains until the accuracy, what was right by the length of the dataset, suffices."""

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

epoch = accuracy = 0
while accuracy < 0.6 and epoch < 6:
    correct = 0
    for inputs, labels in loader:
        output = model(inputs)
        F.cross_entropy(output, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        correct += (output.argmax(1) == labels).sum().item()
    accuracy = correct / len(loader.dataset)
    epoch += 1

with torch.no_grad():
    result = model(x[:4].to(device))
