"""Batches in a UserDict, as Hugging Face's tokenizers and collators give."""

from collections import UserDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader


class BatchEncoding(UserDict):
    pass


def collate(samples):
    ids, labels = zip(*samples)
    return BatchEncoding(ids=torch.stack(ids), labels=torch.stack(labels))


ids = torch.randint(0, 20, (24, 5))
data = [(row, row.sum() % 2) for row in ids]
loader = DataLoader(data, batch_size=8, collate_fn=collate)
model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = prepare(model, optimizer, loader, shuffle=False)

for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["ids"]), batch["labels"])
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(ids[:4].to(device))
