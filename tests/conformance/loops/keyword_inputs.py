"""Inputs by keyword: model(features=..., mask=...)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, features, mask=None):
        return self.layers(features if mask is None else features * mask)


x = torch.randn(24, 6)
mask = (torch.rand(24, 6) > 0.2).float()
y = (x[:, 0] > x[:, 1]).long()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, mask, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, masks, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features=inputs, mask=masks), labels)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(features=x[:4].to(device))
