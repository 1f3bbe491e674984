"""A loss that has weights, with an optimizer of its own (center loss)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = torch.randint(0, 3, (24,))

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
centers = nn.Parameter(torch.randn(3, 4, device=device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer_centers = torch.optim.SGD([centers], lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        optimizer_centers.zero_grad()
        loss = F.cross_entropy(-torch.cdist(model(inputs), centers), labels)
        loss.backward()
        optimizer.step()
        optimizer_centers.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), centers.detach().clone()]
