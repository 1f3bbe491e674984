"""Two tasks in turn: in every batch one of the heads has no gradient."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])

    def forward(self, x, task):
        return self.heads[task](torch.relu(self.shared(x)))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
model = MultiTask()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(4):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, epoch % 2), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = [model(x[:4].to(device), 0), model(x[:4].to(device), 1)]
