"""PyTorch's siamese example: two images, one tower, called twice."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

left, right = torch.randn(24, 6), torch.randn(24, 6)
same = (left[:, 0] * right[:, 0] > 0).float()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(left, right, same), batch_size=8, shuffle=False
)

for epoch in range(2):
    for x1, x2, target in loader:
        optimizer.zero_grad()
        distance = F.pairwise_distance(model(x1), model(x2))
        loss = torch.mean(
            target * distance.pow(2)
            + (1 - target) * torch.clamp(2.0 - distance, min=0).pow(2)
        )
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(left[:4].to(device))
