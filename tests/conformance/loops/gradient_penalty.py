"""WGAN-GP: the penalty is on a gradient (autograd.grad with create_graph)."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

real = torch.randn(24, 2) * 0.5 + 2
fake = torch.randn(24, 2)
alpha = torch.rand(24, 1)

critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
critic, optimizer, loader = prepare(
    critic, optimizer, TensorDataset(real, fake, alpha), batch_size=8, shuffle=False
)

for epoch in range(2):
    for x_real, x_fake, a in loader:
        optimizer.zero_grad()
        between = (a * x_real + (1 - a) * x_fake).requires_grad_(True)
        scores = critic(between)
        (gradients,) = torch.autograd.grad(
            scores, between, torch.ones_like(scores), create_graph=True
        )
        penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(x_fake).mean() - critic(x_real).mean() + penalty
        loss.backward()
        optimizer.step()

result = critic(real[:4].to(device)).detach()
