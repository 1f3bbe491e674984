"""An optimizer of the user's own that makes its state as it is made, as MADGRAD."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class DualAveraging(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["squares"] = torch.zeros_like(p)
                self.state[p]["start"] = p.detach().clone()
                self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["sum"].add_(p.grad, alpha=group["lr"])
                state["squares"].addcmul_(p.grad, p.grad)
                scale = state["squares"].add(1e-3).pow(1 / 3)
                p.copy_(state["start"] - state["sum"] / scale)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = DualAveraging(model.parameters(), lr=0.1)
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
