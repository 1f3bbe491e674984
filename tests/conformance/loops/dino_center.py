"""DINO: the mean of the teacher's outputs, kept from batch to batch, is taken off."""

import copy

import torch
from torch import nn
from torch.utils.data import TensorDataset

view1 = torch.randn(24, 6)
view2 = view1 + 0.3 * torch.randn(24, 6)

student = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))
teacher = copy.deepcopy(student).requires_grad_(False).to(device)
optimizer = torch.optim.SGD(student.parameters(), lr=0.3)
student, optimizer, loader = prepare(
    student, optimizer, TensorDataset(view1, view2), batch_size=8, shuffle=False
)

center = torch.zeros(8, device=device)
for epoch in range(2):
    for x1, x2 in loader:
        found = student(x1)
        with torch.no_grad():
            wanted = teacher(x2)
        target = ((wanted - center) / 0.1).softmax(-1)
        loss = -(target * found.log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        center = 0.5 * center + 0.5 * wanted.mean(0)

with torch.no_grad():
    result = student(view1[:4].to(device))
