"""Many tutorials: forward, then zero_grad, backward, step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.linspace(-1, 1, 24).unsqueeze(1)
y = x.pow(2) + 0.1 * torch.rand(24, 1)

net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
net, optimizer, loader = prepare(
    net, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(3):
    for step, (batch_x, batch_y) in enumerate(loader):
        prediction = net(batch_x)
        loss = F.mse_loss(prediction, batch_y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = net(x[::6].to(device))
