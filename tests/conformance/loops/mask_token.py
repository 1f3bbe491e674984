"""A learned mask token, which only a part with masked samples uses (BERT, MAE)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(32, 6)
x[:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]).repeat(4)
y = (x[:, 1] > x[:, 2]).long()


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.mask_token = nn.Parameter(torch.zeros(6))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        mask = x[:, 0] > 0
        if mask.any():
            x = torch.where(mask[:, None], self.mask_token, x)
        return self.head(F.gelu(self.embed(x)))


model = Masked()
optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(4):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
