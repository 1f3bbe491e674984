"""Blocks that are given an embedding's table, normalized, and a mask, as DeBERTa's and
Longformer's are; a size comes as a tensor."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.positions = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, table, mask):
        return x + mask * F.relu(self.up(x) + self.positions(table).mean(0))


class Model(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(3)])
        self.table, self.bias = nn.Embedding(5, dim), nn.Embedding(3, dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 2)

    def forward(self, x):
        mask = torch.ones(len(x), 1, device=x.device)
        x = self.embed(x)
        halves = torch.div(x.size(1), 2, rounding_mode="trunc")
        x = x.view(len(x), halves, 2).flatten(1) * mask.type_as(x)
        mask = mask.to(x.dtype)
        table = self.norm(self.table.weight)
        for block in self.blocks:
            x = block(x, table, mask)
        return self.head(self.blocks[0](x, self.bias.weight, mask))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
