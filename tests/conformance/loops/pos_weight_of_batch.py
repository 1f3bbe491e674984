"""The rarer class weighted up, by the counts of each batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1] + 0.5).float()[:, None]

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, targets in loader:
        pos_weight = (targets == 0).sum() / targets.sum().clamp(min=1)
        loss = F.binary_cross_entropy_with_logits(
            model(inputs), targets, pos_weight=pos_weight
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
