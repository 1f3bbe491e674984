"""Metric learning: anchor, positive and negative through one model."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

anchors = torch.randn(24, 6)
positives = anchors + 0.2 * torch.randn(24, 6)
negatives = torch.randn(24, 6)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
criterion = nn.TripletMarginLoss(margin=1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = prepare(
    model,
    optimizer,
    TensorDataset(anchors, positives, negatives),
    batch_size=8,
    shuffle=False,
)

for epoch in range(2):
    for anchor, positive, negative in loader:
        optimizer.zero_grad()
        loss = criterion(model(anchor), model(positive), model(negative))
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(anchors[:4].to(device))
