"""A rank's samples decide which of two layers runs, that are no list of blocks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class DayAndNight(nn.Module):
    def __init__(self):
        super().__init__()
        self.day, self.night, self.head = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        is_day = x[:, 0] > 0
        hidden = torch.zeros_like(x)
        if is_day.any():
            hidden[is_day] = self.day(x[is_day]).to(x.dtype)
        if not is_day.all():
            hidden[~is_day] = self.night(x[~is_day]).to(x.dtype)
        return self.head(hidden)


x = torch.randn(32, 6)
x[:, 0] = torch.ones(32).view(-1, 4).mul(torch.tensor([[1.0], [-1.0]] * 4)).flatten()
y = (x[:, 1] > x[:, 2]).long()
model = DayAndNight()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:8].to(device))
