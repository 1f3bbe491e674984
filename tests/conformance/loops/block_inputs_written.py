"""Blocks write in place to what they are given, and forward goes on with it: an
activation of which a skip connection has the result, and a sum that is added to."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation = nn.LeakyReLU(0.5, inplace=True)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x, total):
        found = self.down(torch.tanh(self.up(self.activation(x))))
        total += found
        return found


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        x.clamp_(-2, 2)
        h = self.stem(x)
        total = torch.zeros_like(h)
        for block in self.blocks:
            h = h + block(h, total)
        return self.head(torch.cat([h, total], dim=1))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
