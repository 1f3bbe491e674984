"""A layer that is made in mid-run joins the optimizer by add_param_group."""

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

scale = nn.Parameter(torch.ones(2, device=device))
optimizer.add_param_group({"params": [scale], "lr": 0.5})
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs) * scale, labels).backward()
        optimizer.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), scale.detach().clone()]
