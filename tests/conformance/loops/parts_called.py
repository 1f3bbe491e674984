"""A VAE by its parts, with layers outside of all blocks, and samples between epochs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.mean = nn.Linear(8, 3)
        self.log_var = nn.Linear(8, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6))
        self.out = nn.Linear(6, 6)

    def encode(self, x):
        hidden = torch.tanh(self.body(x))
        return self.mean(hidden), self.log_var(hidden)

    def decode(self, z):
        return self.out(self.decoder(z))

    def forward(self, x):
        return self.decode(self.encode(x)[0])


x = torch.randn(28, 6)
model = VAE()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x), batch_size=8, shuffle=False
)

for epoch in range(2):
    for (inputs,) in loader:
        mean, log_var = model.encode(inputs)
        divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()
        loss = F.mse_loss(model.decode(mean), inputs) + 0.1 * divergence
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        samples = model.decode(torch.ones(2, 3, device=device))

with torch.no_grad():
    result = torch.cat([samples, model(x[:4].to(device))])
