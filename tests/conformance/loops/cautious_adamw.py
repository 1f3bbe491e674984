"""A cautious AdamW: a subclass that takes its step again under a mask with a mean."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class CautiousAdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        params = [
            p for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        before = [p.clone() for p in params]
        super().step()
        for p, old in zip(params, before):
            update = p - old
            mask = (update * p.grad < 0).to(update.dtype)
            p.copy_(old + update * mask / mask.mean().clamp(min=1e-3))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = CautiousAdamW(model.parameters(), lr=0.01)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
