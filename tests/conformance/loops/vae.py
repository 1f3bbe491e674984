"""PyTorch's VAE example; its noise is a part of each sample, so that runs compare."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc21 = nn.Linear(16, 2)
        self.fc22 = nn.Linear(16, 2)
        self.fc3 = nn.Linear(2, 8)

    def reparameterize(self, mu, logvar, eps):
        return mu + eps * torch.exp(0.5 * logvar)

    def forward(self, x, eps):
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = self.reparameterize(mu, logvar, eps)
        return self.fc3(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy_with_logits(recon_x, x, reduction="none").sum(1)
    kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return (bce + kld).mean()


x, noise = torch.rand(24, 8), torch.randn(24, 2)
model = VAE()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, noise), batch_size=8, shuffle=False
)

for epoch in range(2):
    for data, eps in loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data, eps)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device), noise[:4].to(device))[0]
