"""Batches of one item of several rows: the loop takes the first dimension away."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

x = torch.randn(8, 4, 6)
y = (x[..., 0] > x[..., 1]).long()


class Bags(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        return x[index], y[index]


model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, DataLoader(Bags(), batch_size=1))

for inputs, labels in loader:
    inputs, labels = inputs.squeeze(0), labels.squeeze(0)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()

with torch.no_grad():
    result = model(x[0].to(device))
