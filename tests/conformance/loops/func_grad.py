"""torch.func: gradients by grad_and_value of a function of the parameters."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.func import grad_and_value
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)


def compute_loss(params, inputs, labels):
    return F.cross_entropy(functional_call(model, params, (inputs,)), labels)


for epoch in range(2):
    for inputs, labels in loader:
        params = {k: v.detach() for k, v in model.named_parameters()}
        grads, loss = grad_and_value(compute_loss)(params, inputs, labels)
        for name, p in model.named_parameters():
            p.grad = grads[name]
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
