"""Batches that are dicts, handed on with ** (Hugging Face's course)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Texts(Dataset):
    def __init__(self):
        self.ids = torch.randint(1, 20, (24, 5))
        self.mask = (torch.rand(24, 5) > 0.2).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {
            "input_ids": self.ids[i],
            "attention_mask": self.mask[i],
            "labels": self.ids[i].sum() % 2,
        }


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask.unsqueeze(-1)
        pooled = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        logits = self.head(pooled)
        return (F.cross_entropy(logits, labels) if labels is not None else None), logits


data = Texts()
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8, shuffle=False)

for epoch in range(2):
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        loss, logits = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(data.ids[:4].to(device), data.mask[:4].to(device))[1]
