"""A line search (SLS): step() takes the gradient of the loss that a closure returns."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class SLS(torch.optim.Optimizer):
    def __init__(self, params, step_size=1.0, c=0.1, beta=0.7):
        super().__init__(params, {"step_size": step_size, "c": c, "beta": beta})

    def step(self, closure):
        loss = closure()
        loss.backward()
        [group] = self.param_groups
        before = [p.detach().clone() for p in group["params"]]
        grads = [p.grad for p in group["params"]]
        norm = sum(grad.square().sum() for grad in grads)
        step_size = group["step_size"]
        with torch.no_grad():
            for _ in range(10):
                for p, start, grad in zip(group["params"], before, grads, strict=True):
                    p.copy_(start - step_size * grad)
                if closure() <= loss - step_size * group["c"] * norm:
                    break
                step_size *= group["beta"]
        return loss


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = SLS(model.parameters(), step_size=20.0)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        optimizer.step(lambda: F.cross_entropy(model(inputs), labels))

with torch.no_grad():
    result = model(x[:4].to(device))
