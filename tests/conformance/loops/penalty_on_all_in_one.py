"""A penalty on all parameters in one vector, beside a loss whose last batch is
uneven."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(21, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for inputs, labels in loader:
    weights = torch.cat([p.flatten() for p in model.parameters()])
    loss = F.cross_entropy(model(inputs), labels)
    loss = loss * (1 + 0.01 * weights.norm()) + 0.01 * weights.abs().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
