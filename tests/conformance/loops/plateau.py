"""ReduceLROnPlateau on a validation loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

x = torch.randn(16, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

scheduler = ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
for epoch in range(3):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = F.cross_entropy(model(x.to(device)), y.to(device))
    scheduler.step(val_loss)

with torch.no_grad():
    result = [model(x[:4].to(device)), optimizer.param_groups[0]["lr"]]
