"""PyTorch's DQN tutorial: a target network, updated softly from the state dicts."""

import copy

import torch
from torch import nn
from torch.utils.data import TensorDataset

state, next_state = torch.randn(32, 4), torch.randn(32, 4)
action = torch.randint(0, 2, (32, 1))
reward = torch.randn(32)

policy_net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
target_net = copy.deepcopy(policy_net).to(device)
optimizer = torch.optim.SGD(policy_net.parameters(), lr=0.3)
policy_net, optimizer, loader = prepare(
    policy_net,
    optimizer,
    TensorDataset(state, action, reward, next_state),
    batch_size=8,
    shuffle=False,
)

TAU, GAMMA = 0.2, 0.9
criterion = nn.SmoothL1Loss()
for s, a, r, s2 in loader:
    q = policy_net(s).gather(1, a)
    with torch.no_grad():
        next_q = target_net(s2).max(1).values
    loss = criterion(q, (next_q * GAMMA + r).unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    target_net_state_dict = target_net.state_dict()
    policy_net_state_dict = policy_net.state_dict()
    for key in policy_net_state_dict:
        target_net_state_dict[key] = policy_net_state_dict[
            key
        ] * TAU + target_net_state_dict[key] * (1 - TAU)
    target_net.load_state_dict(target_net_state_dict)

with torch.no_grad():
    result = [policy_net(state[:4].to(device)), target_net(state[:4].to(device))]
