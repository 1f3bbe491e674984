"""PyTorch's REINFORCE example: the loss is built of log-probabilities and returns."""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset

states = torch.randn(32, 4)
actions = torch.randint(0, 2, (32,))
returns = torch.randn(32)

policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), nn.Softmax(-1))
optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
policy, optimizer, loader = prepare(
    policy,
    optimizer,
    TensorDataset(states, actions, returns),
    batch_size=8,
    shuffle=False,
)

for state, action, value in loader:
    policy_loss = []
    for probs, a, r in zip(policy(state), action, value):
        policy_loss.append(-Categorical(probs).log_prob(a) * r)
    optimizer.zero_grad()
    policy_loss = torch.stack(policy_loss).mean()
    policy_loss.backward()
    optimizer.step()

with torch.no_grad():
    result = policy(states[:4].to(device))
