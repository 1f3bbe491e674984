"""REINFORCE with a dot product of log-probabilities and returns: a sum."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

states = torch.randn(32, 6)
actions = (states[:, 0] > 0).long()
returns = states[:, 1] - states[:, 2]

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(
    model,
    optimizer,
    TensorDataset(states, actions, returns),
    batch_size=8,
    shuffle=False,
)

for epoch in range(2):
    for state, action, reward in loader:
        optimizer.zero_grad()
        log_probs = model(state).log_softmax(1)
        chosen = log_probs.gather(1, action[:, None]).squeeze(1)
        loss = -torch.dot(chosen, reward)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(states[:4].to(device))
