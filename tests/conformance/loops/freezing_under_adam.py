"""The body is frozen for an epoch, and the heads take turns, under AdamW: what gets no
gradient is left as it is, without decay and momentum."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])

    def forward(self, x, number):
        return self.heads[number](self.body(x))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(4):
    model.body.requires_grad_(epoch != 2)
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, epoch % 2), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = [model(x[:4].to(device), number) for number in range(2)]
