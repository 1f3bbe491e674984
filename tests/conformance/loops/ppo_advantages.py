"""PPO: several epochs over a rollout; advantages are normalized in each minibatch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(32, 4)
y = torch.randint(0, 2, (32,))
old_log_prob = torch.full((32,), -0.7)
advantage = torch.randn(32) + torch.arange(32) / 8
returns = torch.randn(32)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 16)
        self.actor = nn.Linear(16, 2)
        self.critic = nn.Linear(16, 1)

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.actor(hidden), self.critic(hidden).squeeze(1)


model = ActorCritic()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model,
    optimizer,
    TensorDataset(x, y, old_log_prob, advantage, returns),
    batch_size=8,
    shuffle=False,
)

for epoch in range(3):
    for s, a, old, adv, ret in loader:
        logits, value = model(s)
        dist_ = torch.distributions.Categorical(logits=logits)
        ratio = (dist_.log_prob(a) - old).exp()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        surrogate = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        loss = -surrogate.mean() + 0.5 * F.mse_loss(value, ret)
        loss = loss - 0.01 * dist_.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
