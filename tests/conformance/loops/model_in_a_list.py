"""Models and optimizers in lists, looped over (an ensemble, trained side by side)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
data = TensorDataset(x, y)

models = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in models]
for i in range(2):
    models[i], optimizers[i], loader = prepare(
        models[i], optimizers[i], data, batch_size=8, shuffle=False
    )

for epoch in range(2):
    for inputs, labels in loader:
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

with torch.no_grad():
    result = [model(x[:4].to(device)) for model in models]
