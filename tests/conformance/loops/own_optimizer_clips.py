"""An optimizer of the user's own that clips the whole gradient in its step, as LAMB."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class ClippedMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, max_norm=0.3):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self, closure=None):
        params = [
            p for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        norm = torch.zeros(1)
        for p in params:
            norm.add_(p.grad.pow(2).sum())
        scale = self.max_norm / norm.sqrt().clamp(min=self.max_norm)
        lr, momentum = self.param_groups[0]["lr"], self.param_groups[0]["momentum"]
        for p in params:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            m.mul_(momentum).add_(p.grad * scale)
            p.add_(m, alpha=-lr)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = ClippedMomentum(model.parameters(), lr=0.3)
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
