"""Padded tokens: the mean is over those that are not padding (ignore_index)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

ids = torch.randint(1, 12, (24, 8))
lengths = 8 - torch.arange(24).unsqueeze(1) % 8
targets = torch.where(torch.arange(8) < lengths, ids.roll(-1, 1), -100)

model = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(ids, targets), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        logits = model(inputs)
        loss = F.cross_entropy(logits.view(-1, 12), labels.view(-1), ignore_index=-100)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(ids[:4].to(device))
