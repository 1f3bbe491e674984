"""Embeddings whose rows are kept short by max_norm."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(12, 6, max_norm=1.0)
        self.fc = nn.Linear(6, 2)

    def forward(self, ids):
        return self.fc(self.tokens(ids).mean(1))


x = torch.randint(0, 12, (24, 4))
y = (x[:, 0] > 5).long()

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

with torch.no_grad():
    result = model(x[:4].to(device))
