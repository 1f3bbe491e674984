"""A small convolutional net with GroupNorm."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

images = torch.randn(24, 1, 8, 8)
labels = (images.mean((1, 2, 3)) > 0).long()

model = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1),
    nn.GroupNorm(2, 4),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(4, 8, 3),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(images, labels), batch_size=8, shuffle=False
)

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

with torch.no_grad():
    result = model(images[:4].to(device))
