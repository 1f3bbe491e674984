"""A small transformer of PyTorch's own layers, with a mask."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class LanguageModel(nn.Module):
    def __init__(self, vocab=11, dim=8, length=6):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(torch.zeros(length, dim))
        layer = nn.TransformerEncoderLayer(dim, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool())

    def forward(self, ids):
        x = self.tokens(ids) + self.positions
        return self.head(self.encoder(x, mask=self.mask))


ids = torch.arange(24).unsqueeze(1).add(2 * torch.arange(7)) % 11
model = LanguageModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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

model.eval()
with torch.no_grad():
    result = model(ids[:4, :-1].to(device))
