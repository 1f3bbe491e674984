"""PCGrad: each task's gradient is saved, and what conflicts is projected away."""

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

for epoch in range(2):
    for inputs, labels in loader:
        saved = []
        for shift in (0.0, 0.5):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs + shift), labels).backward()
            saved.append([p.grad.clone() for p in model.parameters()])
        dot = sum((a * b).sum() for a, b in zip(*saved))
        for p, a, b in zip(model.parameters(), *saved):
            p.grad = a + b if dot > 0 else b
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
