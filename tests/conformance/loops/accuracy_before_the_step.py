"""The model is called again between backward and step, with gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 6))
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.body(x + self.position)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        accuracy = (model(inputs).argmax(1) == labels).float().mean()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.5, 0.5)

with torch.no_grad():
    result = model(x[:4].to(device))
