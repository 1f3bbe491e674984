"""A mixture of experts, routed by the sample: a rank may use other experts than the
next, and in some batches not all of them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        hidden = F.relu(self.trunk(x))
        chosen = x[:, 0].long()
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            is_mine = chosen == number
            if is_mine.any():
                mixed[is_mine] = expert(hidden[is_mine]).to(mixed.dtype)
        return self.head(hidden + mixed)


x = torch.randn(24, 6)
x[:, 0] = torch.arange(24) // 4 % 3
y = (x[:, 1] > x[:, 2]).long()

model = Experts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:12].to(device))
