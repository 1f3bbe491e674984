"""A convolutional net in channels_last memory format."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 3, 6, 6)
y = (x.mean((1, 2, 3)) > 0).long()

model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 2)
).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(
            model(inputs.to(memory_format=torch.channels_last)), labels
        ).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
