"""PPO as in CleanRL: minibatches of a rollout in memory, by a shuffled index."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(32, 4)
y = torch.randint(0, 2, (32,))
advantage = torch.randn(32)

model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

x, y, advantage = x.to(device), y.to(device), advantage.to(device)
with torch.no_grad():
    old = F.log_softmax(model(x), dim=1).gather(1, y[:, None])
rng = np.random.default_rng(1)
indices = np.arange(32)
for epoch in range(2):
    rng.shuffle(indices)
    for start in range(0, 32, 8):
        chosen = indices[start : start + 8]
        new = F.log_softmax(model(x[chosen]), dim=1).gather(1, y[chosen][:, None])
        ratio = (new - old[chosen]).exp().squeeze(1)
        adv = advantage[chosen]
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
