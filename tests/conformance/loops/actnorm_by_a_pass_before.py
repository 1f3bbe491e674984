"""A flow's ActNorm, which one pass without gradients sets before training starts."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class ActNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(size))
        self.logs = nn.Parameter(torch.zeros(size))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x):
        if not self.initialized:
            self.loc.data.copy_(-x.mean(0))
            self.logs.data.copy_(-torch.log(x.std(0) + 1e-6))
            self.initialized.fill_(True)
        return (x + self.loc) * self.logs.exp(), self.logs.sum().expand(len(x))


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = ActNorm(6)
        self.mix = nn.Linear(6, 6)
        self.last = ActNorm(6)

    def forward(self, x):
        x, one = self.first(x)
        x, other = self.last(x + 0.1 * torch.tanh(self.mix(x)))
        return x, one + other


x = 1 + 3 * torch.randn(24, 6)

model = Flow()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x), batch_size=8, shuffle=False
)

with torch.no_grad():
    model(x.to(device))

for epoch in range(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        z, logdet = model(inputs)
        (0.5 * z.square().sum(1) - logdet).mean().backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    result = list(model(x[:4].to(device)))
