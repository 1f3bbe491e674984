"""A function of one's own gives no gradient where none of its samples counts."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gate):
        ctx.save_for_backward(x * gate, weight * 1.0)
        ctx.is_open = bool(gate.any())
        return (x * gate) @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = gradient.to(weight.dtype)
        of_weight = gradient.t() @ x.to(weight.dtype) if ctx.is_open else None
        return gradient @ weight, of_weight, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        is_first = (x[:, :1] > 0).to(self.first.weight.dtype)
        x = x.to(is_first.dtype)
        hidden = Gated.apply(x, self.first.weight, is_first) + self.first.bias
        hidden = hidden + Gated.apply(x, self.second.weight, 1 - is_first)
        return self.head(hidden + self.second.bias)


x = torch.randn(32, 6)
x[:, 0] = torch.ones(32).view(-1, 4).mul(torch.tensor([[1.0], [-1.0]] * 4)).flatten()
y = (x[:, 1] > x[:, 2]).long()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
