"""Two heads, two losses, one sum."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 16)
        self.heads = nn.ModuleDict(
            {"kind": nn.Linear(16, 3), "value": nn.Linear(16, 1)}
        )

    def forward(self, x):
        x = torch.relu(self.shared(x))
        return {name: head(x) for name, head in self.heads.items()}


x = torch.randn(24, 6)
kind = torch.randint(0, 3, (24,))
value = x.sum(1, keepdim=True)
model = MultiTask()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, kind, value), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, kinds, values in loader:
        optimizer.zero_grad()
        out = model(inputs)
        loss = F.cross_entropy(out["kind"], kinds) + F.mse_loss(out["value"], values)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
