"""Several heads train on activations that the loop has cut off, with one backward pass
each, and the trunk then gets what they gave, as in multi-token prediction and split
learning. The last batch has uneven parts, one of a single number."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(19, 6)
y = (x[:, 0] > x[:, 1]).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 1), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(1, 2) for _ in range(2))

    def forward(self, x):
        return self.heads[0](self.trunk(x))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        hidden = model.trunk(inputs)
        cut = nn.Parameter(hidden.detach(), requires_grad=False)
        cut.requires_grad = True
        for head, targets in zip(model.heads, (labels, 1 - labels)):
            F.cross_entropy(head(cut), targets).backward()
        hidden.backward(gradient=cut.grad)
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
