"""A ModuleDict of a network and a layer, which the loop calls one after the other."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def network(num_inputs, num_outputs):
    return nn.Sequential(
        nn.Linear(num_inputs, 16), nn.Tanh(), nn.Linear(16, num_outputs)
    )


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.ModuleDict({"encoder": network(6, 12), "head": nn.Linear(12, 2)})
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model["head"](model["encoder"](inputs)), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model["head"](model["encoder"](x[:4].to(device)))
