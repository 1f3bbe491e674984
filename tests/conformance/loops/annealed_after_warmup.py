"""A temperature that the model's forward lowers with every call after the first epoch,
of which the loop tells it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.fc2 = nn.Linear(16, 2)
        self.temperature, self.epoch = 2.0, 0

    def forward(self, x):
        if self.training and self.epoch > 0:
            self.temperature = max(0.3, 0.7 * self.temperature)
        return self.fc2(torch.tanh(self.fc1(x) / self.temperature))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(3):
    model.epoch = epoch
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    result = model(x[:4].to(device))
