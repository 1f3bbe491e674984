"""Skip-gram with negative sampling; the negatives are a part of the data."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randint(0, 9, (24,))
y = torch.randint(0, 9, (24,))
negatives = torch.randint(0, 9, (24, 3))


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.center = nn.Embedding(9, 6)
        self.context = nn.Embedding(9, 6)

    def forward(self, center, context, negatives):
        v = self.center(center)
        positive = F.logsigmoid((v * self.context(context)).sum(1))
        scores = torch.bmm(self.context(negatives), v.unsqueeze(2)).squeeze(2)
        return -(positive + F.logsigmoid(-scores).sum(1)).mean()


model = SkipGram()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y, negatives), batch_size=8, shuffle=False
)

for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()

result = model.center.weight
result = (result.full_tensor() if hasattr(result, "full_tensor") else result) * 1.0
