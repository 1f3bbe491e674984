"""A method that calls the model again and again: model.generate after training."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Bigram(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab, 16)
        self.head = nn.Linear(16, vocab)

    def forward(self, ids):
        return self.head(self.embedding(ids))

    @torch.no_grad()
    def generate(self, ids, max_new_tokens):
        for _ in range(max_new_tokens):
            logits = self(ids)[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        return ids


ids = torch.arange(24).unsqueeze(1).add(torch.arange(6)) % 5
model = Bigram(5)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
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

written = model.generate(torch.tensor([[0], [1], [2]], device=device), 5)
with torch.no_grad():
    result = [model(ids[:4].to(device)), written.float()]
