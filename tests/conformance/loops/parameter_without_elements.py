"""A model with 0 register tokens: their parameter has no elements."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self, num_registers):
        super().__init__()
        self.registers = nn.Parameter(torch.zeros(1, num_registers, 6))
        self.fc = nn.Linear(6, 2)

    def forward(self, x):
        tokens = torch.cat([self.registers.expand(len(x), -1, -1), x], 1)
        return self.fc(torch.tanh(tokens).mean(1))


x = torch.randn(24, 4, 6)
y = (x[:, 0, 0] > x[:, 1, 1]).long()

model = Net(num_registers=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
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
