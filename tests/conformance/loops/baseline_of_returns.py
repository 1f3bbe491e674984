"""REINFORCE with a moving baseline of the rewards, kept across batches."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = torch.randint(0, 2, (24,))
reward = torch.randn(24) + torch.arange(24) % 8

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y, reward), batch_size=8, shuffle=False
)
baseline = 0.0

for epoch in range(2):
    for states, actions, rewards in loader:
        log_prob = F.log_softmax(model(states), dim=1).gather(1, actions[:, None])
        loss = -(log_prob.squeeze(1) * (rewards - baseline)).mean()
        baseline = 0.8 * baseline + 0.2 * rewards.mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
