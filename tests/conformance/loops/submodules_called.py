"""model.features and model.classifier are called in turn, and forward never is."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.classifier = nn.Linear(16, 2)

    def forward(self, x):
        return self.classifier(self.features(x))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model.classifier(model.features(inputs)), labels)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
