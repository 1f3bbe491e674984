"""torch.func.functional_call with the parameters as a dict (a MAML-like inner step)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

support_x, support_y = x[:8].to(device), y[:8].to(device)
for epoch in range(2):
    for inputs, labels in loader:
        params = dict(model.named_parameters())
        inner = F.cross_entropy(functional_call(model, params, (support_x,)), support_y)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        adapted = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads)}
        loss = F.cross_entropy(functional_call(model, adapted, (inputs,)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
