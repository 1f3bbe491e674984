"""A curriculum: the easy samples first, then all of them, with the same optimizer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Subset
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
dataset = TensorDataset(x, y)
easy = (x[:, 0] - x[:, 1]).abs().argsort(descending=True)[:8].tolist()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
easy_loader = DataLoader(Subset(dataset, easy), batch_size=8)
model, optimizer, loader = prepare(
    model, optimizer, dataset, batch_size=8, shuffle=False
)

for stage in (easy_loader, loader, loader):
    for inputs, labels in stage:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
