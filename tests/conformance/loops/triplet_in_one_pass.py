"""Metric learning: the three inputs concatenated, and so one forward pass."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

anchors = torch.randn(24, 6)
positives = anchors + 0.2 * torch.randn(24, 6)
negatives = torch.randn(24, 6)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
dataset = TensorDataset(anchors, positives, negatives)
model, optimizer, loader = prepare(
    model, optimizer, dataset, batch_size=8, shuffle=False
)

for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        anchor, positive, negative = model(torch.cat(batch)).chunk(3)
        loss = F.triplet_margin_loss(anchor, positive, negative)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(anchors[:4].to(device))
