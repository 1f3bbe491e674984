"""Domain adaptation: an autograd.Function that turns the gradient around."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(6, 16)
        self.label = nn.Linear(16, 2)
        self.domain = nn.Linear(16, 2)

    def forward(self, x):
        x = torch.relu(self.features(x))
        return self.label(x), self.domain(GradReverse.apply(x))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
domain = torch.arange(24) % 2
model = DANN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y, domain), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels, domains in loader:
        optimizer.zero_grad()
        label_out, domain_out = model(inputs)
        loss = F.cross_entropy(label_out, labels) + F.cross_entropy(domain_out, domains)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))[0]
