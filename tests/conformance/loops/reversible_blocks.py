"""Reversible blocks (RevNet): a Function computes its inputs again in its backward, and
returns the gradients of the parameters, too."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x1, x2, f, g, *parameters):
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    def backward(ctx, dy1, dy2):
        y1, y2 = ctx.saved_tensors
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            of_y1 = ctx.g(y1)
        found = torch.autograd.grad(of_y1, (y1, *ctx.g.parameters()), dy2)
        dx1, of_g = dy1 + found[0], found[1:]
        with torch.enable_grad():
            x2 = (y2 - of_y1).detach().requires_grad_()
            of_x2 = ctx.f(x2)
        found = torch.autograd.grad(of_x2, (x2, *ctx.f.parameters()), dx1)
        return dx1, dy2 + found[0], None, None, *found[1:], *of_g


class RevNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.f = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.g = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        parameters = (*self.f.parameters(), *self.g.parameters())
        x1, x2 = self.stem(x).chunk(2, 1)
        halves = Reversible.apply(x1, x2, self.f, self.g, *parameters)
        return self.head(torch.cat(halves, 1))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = RevNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
