"""Kendall et al.: the weights of two losses are learned, beside the model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
value = x @ torch.randn(6, 1)
kind = (x[:, 0] > 0).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
log_vars = torch.zeros(2, requires_grad=True, device=device)
optimizer = torch.optim.SGD([*model.parameters(), log_vars], lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, value, kind), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, values, kinds in loader:
        optimizer.zero_grad()
        output = model(inputs)
        losses = torch.stack(
            [F.mse_loss(output[:, :1], values), F.cross_entropy(output[:, 1:], kinds)]
        )
        loss = (torch.exp(-log_vars) * losses + log_vars).sum()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), log_vars.detach().clone()]
