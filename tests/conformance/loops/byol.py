"""BYOL, MoCo: a momentum encoder with no gradient, updated after every step."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

view1 = torch.randn(24, 6)
view2 = view1 + 0.5 * torch.randn(24, 6)

online = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
target = copy.deepcopy(online).to(device)
for p in target.parameters():
    p.requires_grad = False
optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
online, optimizer, loader = prepare(
    online, optimizer, TensorDataset(view1, view2), batch_size=8, shuffle=False
)

for epoch in range(2):
    for x1, x2 in loader:
        with torch.no_grad():
            z1, z2 = target(x1), target(x2)
        p1, p2 = online(x1), online(x2)
        loss = -F.cosine_similarity(p1, z2).mean() - F.cosine_similarity(p2, z1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for param, target_param in zip(online.parameters(), target.parameters()):
            target_param.data = 0.9 * target_param.data + 0.1 * param.data

with torch.no_grad():
    result = [online(view1[:4].to(device)), target(view1[:4].to(device))]
