"""A batch cut into chunks by the user, with a step for each of them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(32, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=16, shuffle=False
)

for inputs, labels in loader:
    optimizer.zero_grad()
    for chunk, answers in zip(inputs.chunk(2), labels.chunk(2)):
        loss = F.cross_entropy(model(chunk), answers) / 2
        loss.backward()
    optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
