"""The best state dict is kept, and loaded at the end (torchvision's tutorial)."""

import copy

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

best_loss = float("inf")
for epoch in range(3):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    if epoch == 1:
        optimizer.param_groups[0]["lr"] = 5.0  # and it gets worse
    model.eval()
    with torch.no_grad():
        val_loss = F.cross_entropy(model(x.to(device)), y.to(device)).item()
    if val_loss < best_loss:
        best_loss = val_loss
        best_model_wts = copy.deepcopy(model.state_dict())
model.load_state_dict(best_model_wts)

with torch.no_grad():
    result = model(x[:4].to(device))
