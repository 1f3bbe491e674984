"""A VQ-VAE whose codebook is a buffer, moved by averages of what fell to each code."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = x.clone()


class VectorQuantizer(nn.Module):
    def __init__(self, num_codes, dim, decay=0.8):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(num_codes, dim))
        self.register_buffer("counts", torch.ones(num_codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z):
        one_hot = F.one_hot(
            torch.cdist(z.float(), self.codes).argmin(1), len(self.codes)
        ).to(z.dtype)
        found = one_hot @ self.codes.to(z.dtype)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(self.decay).add_((1 - self.decay) * one_hot.sum(0))
                self.sums.mul_(self.decay).add_((1 - self.decay) * one_hot.t() @ z)
                self.codes.copy_(self.sums / self.counts[:, None])
        return z + (found - z).detach(), F.mse_loss(z, found.detach())


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 3)
        self.quantizer = VectorQuantizer(4, 3)
        self.decoder = nn.Linear(3, 6)

    def forward(self, x):
        quantized, commitment = self.quantizer(self.encoder(x))
        return self.decoder(quantized), commitment


model = VQVAE()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, _ in loader:
        optimizer.zero_grad()
        reconstructed, commitment = model(inputs)
        loss = F.mse_loss(reconstructed, inputs) + 0.25 * commitment
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    result = model(x[:4].to(device))[0]
