"""An LSTM over packed sequences of unequal length."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(
            self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


ids = torch.randint(0, 12, (24, 5))
lengths = torch.randint(1, 6, (24,))
y = ids[:, 0] % 2
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(ids, lengths, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for tokens, sizes, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens, sizes), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(ids[:4].to(device), lengths[:4])
