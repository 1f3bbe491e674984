"""A model that normalizes by running means, which its forward updates by hand."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.fc2 = nn.Linear(16, 2)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)
            self.count += 1
        return self.fc2(torch.relu(self.fc1(x - self.mean)))


x = torch.randn(24, 6) + torch.arange(24).view(24, 1) / 12
y = (x[:, 0] > x[:, 1]).long()

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    result = [model(x[:4].to(device)), model.mean]
