"""Two losses of one forward pass, each with its own backward (retain_graph)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        output = model(inputs)
        loss1 = F.cross_entropy(output, labels)
        loss2 = 0.1 * output.pow(2).mean()
        loss1.backward(retain_graph=True)
        loss2.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
