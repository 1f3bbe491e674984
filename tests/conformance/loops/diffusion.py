"""A tiny diffusion model: noise and time step are a part of each sample."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 8)
        self.input = nn.Linear(2, 8)
        self.output = nn.Linear(8, 2)

    def forward(self, x, t):
        return self.output(F.silu(self.input(x) + self.time(t)))


x, noise = torch.randn(24, 2) + 2, torch.randn(24, 2)
t = torch.randint(0, 10, (24,))
alpha_bar = torch.cumprod(1 - torch.linspace(0.01, 0.3, 10), 0).to(device)
model = Denoiser()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, noise, t), batch_size=8, shuffle=False
)

for epoch in range(2):
    for x0, eps, steps in loader:
        a = alpha_bar[steps].unsqueeze(1)
        noisy = a.sqrt() * x0 + (1 - a).sqrt() * eps
        loss = F.mse_loss(model(noisy, steps), eps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(noise[:4].to(device), t[:4].to(device))
