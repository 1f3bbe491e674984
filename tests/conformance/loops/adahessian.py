"""AdaHessian: step() differentiates the gradients a second time."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class AdaHessian(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, closure=None):
        [group] = self.param_groups
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        signs = [
            torch.randint(0, 2, p.shape, generator=self.generator) * 2.0 - 1.0
            for p in params
        ]
        found = torch.autograd.grad([p.grad for p in params], params, signs)
        for p, sign, product in zip(params, signs, found, strict=True):
            p.sub_(group["lr"] * p.grad / ((product * sign).abs() + 0.1))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = AdaHessian(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward(create_graph=True)
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
