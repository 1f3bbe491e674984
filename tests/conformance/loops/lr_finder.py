"""A learning rate finder: rates go up, then model and optimizer are set back."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

kept = copy.deepcopy(model.state_dict())
kept_optimizer = copy.deepcopy(optimizer.state_dict())
rates, losses = [], []
for i, (inputs, labels) in enumerate(loader):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 5**i
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.load_state_dict(kept)
optimizer.load_state_dict(kept_optimizer)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
