"""A temperature that the model's forward lowers with every call in training."""

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
        self.num_calls = 0

    def forward(self, x):
        temperature = max(0.3, 2.0 * 0.7**self.num_calls)
        if self.training:
            self.num_calls += 1
        return self.fc2(torch.tanh(self.fc1(x) / temperature))


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
    result = model(x[:4].to(device))
