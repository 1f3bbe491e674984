"""Domain-adversarial training: a layer that turns the gradient around."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
domain = torch.arange(24) % 2


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.alpha * gradient, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.label = nn.Linear(16, 2)
        self.domain = nn.Linear(16, 2)

    def forward(self, x, alpha):
        found = self.features(x)
        return self.label(found), self.domain(Reverse.apply(found, alpha))


model = DANN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y, domain), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels, domains in loader:
        optimizer.zero_grad()
        label, where = model(inputs, 0.3)
        loss = F.cross_entropy(label, labels) + F.cross_entropy(where, domains)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device), 0.3)
