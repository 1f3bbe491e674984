"""A collate_fn that pads sequences to the longest of the batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def collate(samples):
    sequences, labels = zip(*samples)
    return pad_sequence(sequences, batch_first=True), torch.tensor(labels)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(15, 8, padding_idx=0)
        self.head = nn.Linear(8, 2)

    def forward(self, ids):
        return self.head(self.embedding(ids).sum(1))


data = [(torch.randint(1, 15, (2 + i % 5,)), i % 2) for i in range(24)]
loader = DataLoader(data, batch_size=8, collate_fn=collate)
model = Pooled()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(model, optimizer, loader, shuffle=False)

for epoch in range(2):
    for ids, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(ids), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(collate(data[:4])[0].to(device))
