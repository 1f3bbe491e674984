"""The model is called once for each sample (a loop over ragged ones)."""

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
        losses = [
            F.cross_entropy(model(one[None]), label[None])
            for one, label in zip(inputs, labels)
        ]
        (sum(losses) / len(losses)).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
