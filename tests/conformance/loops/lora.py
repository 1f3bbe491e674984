"""LoRA: a frozen linear layer beside a low-rank one that is trained."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class LoRALinear(nn.Module):
    def __init__(self, linear, rank_of_update=2, scale=2.0):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank_of_update, linear.in_features) * 0.3)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank_of_update))
        self.scale = scale

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.a.T @ self.b.T)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(
    LoRALinear(nn.Linear(6, 16)), nn.ReLU(), LoRALinear(nn.Linear(16, 2))
)
optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9
)
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
