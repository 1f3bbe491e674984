"""A language model whose output layer shares the embedding's weight."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class TiedModel(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.decoder = nn.Linear(dim, vocab, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        return self.decoder(torch.tanh(self.mix(self.embedding(ids))))


ids = torch.randint(0, 11, (24, 6))
model = TiedModel(11, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model,
    optimizer,
    TensorDataset(ids[:, :-1], ids[:, 1:]),
    batch_size=8,
    shuffle=False,
)

for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(ids[:4].to(device))
