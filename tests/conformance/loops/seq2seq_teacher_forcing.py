"""PyTorch's seq2seq tutorial: attention, teacher forcing, a loss for each step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randint(1, 9, (24, 5))
y = x.flip(1)


class Seq2Seq(nn.Module):
    def __init__(self, vocab=9, dim=12):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRUCell(2 * dim, dim)
        self.query = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, source, target=None):
        states, hidden = self.encoder(self.embedding(source))
        hidden = hidden[0]
        token = source.new_zeros(len(source))
        outputs = []
        for t in range(source.shape[1]):
            scores = torch.einsum("bd,btd->bt", self.query(hidden), states)
            context = torch.einsum("bt,btd->bd", scores.softmax(1), states)
            step = torch.cat([self.embedding(token), context], dim=1)
            hidden = self.decoder(step, hidden)
            outputs.append(self.out(hidden))
            token = outputs[-1].argmax(1) if target is None else target[:, t]
        return outputs


model = Seq2Seq()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for source, target in loader:
        optimizer.zero_grad()
        loss = 0
        for t, output in enumerate(model(source, target)):
            loss += F.cross_entropy(output, target[:, t])
        (loss / target.shape[1]).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device), y[:4].to(device))
