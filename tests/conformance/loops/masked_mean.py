"""A mean over a mask, written out: (loss * mask).sum() / mask.sum()."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = x @ torch.randn(6, 3)
mask = (torch.arange(24).unsqueeze(1) % 8 < torch.tensor([8, 4, 3])).float()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y, mask), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, targets, known in loader:
        optimizer.zero_grad()
        squared = (model(inputs) - targets).pow(2)
        loss = (squared * known).sum() / known.sum()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
