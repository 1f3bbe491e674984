"""A neural ODE by the adjoint method: a Function with autograd.grad in its backward."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, func, *params):
        ctx.func, ctx.params, ctx.states = func, params, []
        with torch.no_grad():
            for _ in range(3):
                ctx.states.append(z)
                z = z + 0.3 * func(z)
        return z

    @staticmethod
    def backward(ctx, a):
        grads = [torch.zeros_like(p) for p in ctx.params]
        for z in reversed(ctx.states):
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                change = 0.3 * ctx.func(z)
                of_z, *of_params = torch.autograd.grad(change, (z, *ctx.params), a)
            a = a + of_z
            grads = [x + y for x, y in zip(grads, of_params)]
        return (a, None, *grads)


class NeuralODE(nn.Module):
    def __init__(self):
        super().__init__()
        self.func = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(Adjoint.apply(x, self.func, *self.func.parameters()))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = NeuralODE()
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
    result = model(x[:4].to(device))
