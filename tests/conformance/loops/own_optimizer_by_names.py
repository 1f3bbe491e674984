"""An optimizer of one's own that keeps the named parameters, and steps those."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class DecayByName(torch.optim.Optimizer):
    def __init__(self, named_parameters, lr, weight_decay):
        self.named = dict(named_parameters)
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(self.named.values(), defaults)

    @torch.no_grad()
    def step(self, closure=None):
        lr, decay = (self.param_groups[0][key] for key in ("lr", "weight_decay"))
        for name, p in self.named.items():
            if p.grad is None:
                continue
            if not name.endswith("bias"):
                p.mul_(1 - lr * decay)
            p.add_(p.grad, alpha=-lr)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = DecayByName(model.named_parameters(), lr=0.3, weight_decay=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
