"""Two optimizers of one model (weights and biases), both prepared."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
weights = [p for p in net.parameters() if p.dim() > 1]
biases = [p for p in net.parameters() if p.dim() < 2]
opt_weights = torch.optim.SGD(weights, lr=0.3)
opt_biases = torch.optim.SGD(biases, lr=0.1, momentum=0.9)
data = TensorDataset(x, y)
model, opt_weights, loader = prepare(
    net, opt_weights, data, batch_size=8, shuffle=False
)
model, opt_biases, _ = prepare(model, opt_biases, data, batch_size=8, shuffle=False)

for epoch in range(2):
    for inputs, labels in loader:
        opt_weights.zero_grad()
        opt_biases.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        opt_weights.step()
        opt_biases.step()

with torch.no_grad():
    result = model(x[:4].to(device))
