"""L-BFGS, which evaluates the loss itself: optimizer.step(closure)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(16, 6)
y = (3 * x @ torch.randn(6, 1)).sin()

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=16, shuffle=False
)

losses = []
for epoch in range(2):
    for inputs, targets in loader:

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())

with torch.no_grad():
    result = model(x[:4].to(device)), torch.tensor(losses)
