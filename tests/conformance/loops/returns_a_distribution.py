"""A policy: the model and its blocks return distributions and other objects."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

states = torch.randn(24, 6)
actions = states[:, :2] + 0.1 * torch.randn(24, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return SimpleNamespace(hidden=x + self.down(torch.tanh(self.up(x))))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mean, self.spread = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).hidden
        return Normal(self.mean(x), self.spread(x).exp(), validate_args=False)


model = Policy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(states, actions), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, taken in loader:
        loss = -model(inputs).log_prob(taken).sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(states[:4].to(device)).mean
