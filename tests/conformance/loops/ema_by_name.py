"""An EMA kept in a dict by parameter name ("shadow"), as many repositories do."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            shadow[name] = 0.8 * shadow[name] + 0.2 * p.detach()

plain = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
plain.load_state_dict({k.removeprefix("module."): v for k, v in shadow.items()})
with torch.no_grad():
    result = [model(x[:4].to(device)), plain(x[:4].to(device))]
