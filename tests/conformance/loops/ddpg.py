"""DDPG: the critic is frozen while the actor learns through it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 4)
y = torch.randn(24, 2)
reward = torch.randn(24, 1)

actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
actor_optimizer = torch.optim.SGD(actor.parameters(), lr=0.2)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.2)
data = TensorDataset(x, y, reward)
actor, actor_optimizer, loader = prepare(
    actor, actor_optimizer, data, batch_size=8, shuffle=False
)
critic, critic_optimizer, _ = prepare(
    critic, critic_optimizer, data, batch_size=8, shuffle=False
)

for epoch in range(2):
    for s, a, r in loader:
        critic_optimizer.zero_grad()
        F.mse_loss(critic(torch.cat([s, a], dim=1)), r).backward()
        critic_optimizer.step()

        for p in critic.parameters():
            p.requires_grad = False
        actor_optimizer.zero_grad()
        loss = -critic(torch.cat([s, actor(s)], dim=1)).mean()
        loss.backward()
        actor_optimizer.step()
        for p in critic.parameters():
            p.requires_grad = True

with torch.no_grad():
    result = actor(x[:4].to(device))
