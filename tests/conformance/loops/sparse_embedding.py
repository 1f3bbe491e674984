"""nn.Embedding(sparse=True), with an optimizer that takes sparse gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

ids = torch.randint(0, 10, (24, 3))
y = ids[:, 0] % 2

model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Flatten(), nn.Linear(24, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(ids, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for tokens, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(ids[:4].to(device))
