"""An element-wise optimizer of the user's own, which counts its steps itself."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Decaying(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 0.1)
                p.sub_(m.sign() * m.abs().sqrt(), alpha=group["lr"] / self.num_steps)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = Decaying(model.parameters(), lr=0.01)
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
