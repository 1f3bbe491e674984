"""Mixup in the dataset: each sample is mixed with a partner of its own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Mixup(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, F.one_hot(y, 2).float()
        self.partner = torch.randperm(len(x))
        self.share = torch.distributions.Beta(0.4, 0.4).sample((len(x), 1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        j, share = self.partner[i], self.share[i]
        return (
            share * self.x[i] + (1 - share) * self.x[j],
            share * self.y[i] + (1 - share) * self.y[j],
        )


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, Mixup(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, soft_labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), soft_labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
