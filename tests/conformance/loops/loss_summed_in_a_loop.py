"""PyTorch's character RNN tutorial: the samples' losses are added up one by one."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
criterion = nn.CrossEntropyLoss()

for epoch in range(2):
    for inputs, labels in loader:
        batch_loss = 0
        for sample, label in zip(inputs, labels):
            batch_loss += criterion(model(sample[None]), label[None])
        optimizer.zero_grad()
        batch_loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
