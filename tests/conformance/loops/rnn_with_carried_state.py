"""Truncated backpropagation: each sample's hidden state is carried on, detached."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x, hidden):
        hidden = self.cell(x, hidden)
        return self.head(hidden), hidden


x = torch.randn(16, 4, 4)
y = x.sum(-1).cumsum(1)
model = Recurrent()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for inputs, targets in loader:
    hidden = torch.zeros(len(inputs), 8, device=device)
    for start in (0, 2):
        loss = 0.0
        for t in range(start, start + 2):
            output, hidden = model(inputs[:, t], hidden)
            loss = loss + F.mse_loss(output.squeeze(-1), targets[:, t])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hidden = hidden.detach()

with torch.no_grad():
    result = model(x[:4, 0].to(device), torch.zeros(4, 8, device=device))[0]
