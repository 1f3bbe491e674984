"""First-order MAML: a copy is trained, and its gradients are given to the model."""

import copy

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

support_x, support_y = x[:8].to(device), y[:8].to(device)
for epoch in range(2):
    for inputs, labels in loader:
        learner = copy.deepcopy(model)
        inner = torch.optim.SGD(learner.parameters(), lr=0.1)
        F.cross_entropy(learner(support_x), support_y).backward()
        inner.step()
        inner.zero_grad()
        F.cross_entropy(learner(inputs), labels).backward()
        optimizer.zero_grad()
        for p, q in zip(model.parameters(), learner.parameters()):
            p.grad = q.grad.clone()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
