"""An actor and a critic with a common body, both losses summed (A2C, PPO)."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.actor = nn.Linear(16, 2)
        self.critic = nn.Linear(16, 1)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return torch.distributions.Categorical(logits=self.actor(x)), self.critic(x)


states = torch.randn(32, 4)
actions = torch.randint(0, 2, (32,))
returns = torch.randn(32)

model = ActorCritic()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model,
    optimizer,
    TensorDataset(states, actions, returns),
    batch_size=8,
    shuffle=False,
)

for s, a, r in loader:
    dist_, value = model(s)
    advantage = r - value.squeeze(-1)
    policy_loss = -(dist_.log_prob(a) * advantage.detach()).mean()
    value_loss = advantage.pow(2).mean()
    entropy = dist_.entropy().mean()
    loss = policy_loss + 0.5 * value_loss - 0.01 * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad():
    dist_, value = model(states[:4].to(device))
    result = [dist_.logits, value]
