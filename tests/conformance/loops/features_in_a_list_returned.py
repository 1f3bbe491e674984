"""Blocks append to a list that they are given and return it, which nobody looks at."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, features):
        features.append(self.down(torch.tanh(self.up(features[-1]))))
        return features


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        features = [self.stem(x)]
        for block in self.blocks:
            block(features)
        return self.head(sum(features))


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
