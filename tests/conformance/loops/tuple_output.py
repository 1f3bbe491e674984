"""A model that returns a tuple: a prediction and an auxiliary one (Inception)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 16)
        self.auxiliary = nn.Linear(16, 2)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        x = torch.relu(self.first(x))
        auxiliary = self.auxiliary(x)
        return self.head(torch.relu(self.second(x))), auxiliary


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        output, auxiliary = model(inputs)
        loss = F.cross_entropy(output, labels) + 0.4 * F.cross_entropy(
            auxiliary, labels
        )
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))[0]
