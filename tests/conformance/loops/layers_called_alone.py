"""Layers are called one by one, with a penalty on activations, and give features."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        hidden = model[1](model[0](inputs))
        loss = F.cross_entropy(model[2](hidden), labels) + hidden.square().mean()
        loss.backward()
        optimizer.step()

backbone = nn.Sequential(*list(model.children())[:-1])
with torch.no_grad():
    features = backbone(x.to(device))
    result = [torch.cdist(features, features), model(x[:4].to(device))]
