"""Losses summed by item(), divided by len(loader), printed on rank 0."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, train_loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

train_losses = []
for epoch in range(2):
    total_loss = 0
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    train_losses.append(total_loss / len(train_loader))
    if rank == 0:
        print(f"epoch {epoch}: {'ok' if train_losses[-1] > 0 else 'odd'}")

with torch.no_grad():
    result = model(x[:4].to(device))
