"""Validation on rank 0 alone, by a callback that knows whether it is there."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
val_x = torch.randn(12, 6).to(device)
val_y = (val_x[:, 0] > val_x[:, 1]).long()


class Validation:
    def __init__(self):
        self.is_here = not dist.is_initialized() or dist.get_rank() == 0

    def on_epoch_end(self, network):
        if self.is_here:
            network.eval()
            with torch.no_grad():
                print("validation:", F.cross_entropy(network(val_x), val_y).item() > 0)
            network.train()


model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

callbacks = [Validation()]
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    for callback in callbacks:
        callback.on_epoch_end(model)

with torch.no_grad():
    result = model(x[:4].to(device))
