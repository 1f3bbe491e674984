"""PPO's inner epochs: several forward, backward and step on the same batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for inputs, labels in loader:
    with torch.no_grad():
        before = model(inputs)
    for _ in range(2):
        optimizer.zero_grad()
        after = model(inputs)
        loss = F.cross_entropy(after, labels) + 0.5 * F.mse_loss(after, before)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
