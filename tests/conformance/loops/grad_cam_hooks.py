"""Hooks keep activations and their gradients (Grad-CAM), and weigh the loss by them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
kept = {}
model[0].register_forward_hook(lambda m, args, out: kept.update(out=out))
model[0].register_full_backward_hook(lambda m, gi, go: kept.update(grad=go[0]))

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss = loss + 0.01 * kept["out"].pow(2).mean()
        loss.backward()
        assert kept["grad"].shape == kept["out"].shape
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
