"""Validation under torch.inference_mode, before training and after each epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)


@torch.inference_mode()
def evaluate(model):
    model.eval()
    return (model(x.to(device)).argmax(1) == y.to(device)).float().mean().item()


evaluate(model)
for epoch in range(2):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    accuracy = evaluate(model)

with torch.no_grad():
    result = model(x[:4].to(device))
