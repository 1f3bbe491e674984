"""The cell keeps a layer by a name of its own, and calls it beside the model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
head = nn.Linear(16, 2)
model = nn.Sequential(encoder, head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        features = encoder(inputs)
        output = head(features)
        loss = F.cross_entropy(output, labels) + 0.1 * features.pow(2).mean()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
