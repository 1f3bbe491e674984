"""WGAN: the critic's weights are clamped after every step."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

noise = torch.randn(24, 4)
real_samples = torch.randn(24, 2) * 0.5 + 2

generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer_c = torch.optim.SGD(critic.parameters(), lr=0.3)
dataset = TensorDataset(noise, real_samples)
generator = generator.to(device)
critic, optimizer_c, loader = prepare(
    critic, optimizer_c, dataset, batch_size=8, shuffle=False
)

for epoch in range(2):
    for z, real in loader:
        optimizer_c.zero_grad()
        fake = generator(z).detach()
        loss = critic(fake).mean() - critic(real).mean()
        loss.backward()
        optimizer_c.step()
        for p in critic.parameters():
            p.data.clamp_(-0.3, 0.3)

with torch.no_grad():
    result = critic(real_samples[:4].to(device))
