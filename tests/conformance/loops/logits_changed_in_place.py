"""What the model returns, a view of what nn.Linear computes, is changed in place."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 5, 6)
y = torch.randint(4, (24, 5))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh_()
        return self.head(x)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        logits = model(inputs)
        logits /= 0.7
        logits[..., 0] -= 1
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
