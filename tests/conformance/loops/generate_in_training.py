"""RLHF in small: the model writes first (no_grad), and is then trained on that."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

prompts = torch.randint(0, 7, (16, 3))
rewards = torch.randn(7)
policy = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7))
optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
policy, optimizer, loader = prepare(
    policy, optimizer, TensorDataset(prompts), batch_size=8, shuffle=False
)

for epoch in range(2):
    for (ids,) in loader:
        policy.eval()
        with torch.no_grad():
            for _ in range(2):
                following = policy(ids)[:, -1:].argmax(-1)
                ids = torch.cat([ids, following], dim=1)
        policy.train()
        log_probs = F.log_softmax(policy(ids[:, :-1]), dim=-1)
        chosen = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(chosen * rewards.to(device)[ids[:, 1:]]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = policy(prompts[:4].to(device))
