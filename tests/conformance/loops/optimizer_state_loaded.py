"""The state of a plain optimizer is loaded after prepare."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
former = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
for p in model.parameters():
    average = 0.1 * torch.randn_like(p)
    count = torch.tensor(7.0)
    former.state[p] = {"step": count, "exp_avg": average, "exp_avg_sq": average**2}
checkpoint = former.state_dict()  # as of torch.load

optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
optimizer.load_state_dict(checkpoint)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
