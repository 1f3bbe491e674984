"""A VQ-VAE whose forward replaces the codebook by a new parameter, as many do."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)


class VectorQuantizer(nn.Module):
    def __init__(self, num_codes, dim, decay=0.8):
        super().__init__()
        self.decay = decay
        self.codes = nn.Embedding(num_codes, dim)
        self.sums = nn.Parameter(torch.randn(num_codes, dim))
        self.register_buffer("counts", torch.ones(num_codes))

    def forward(self, z):
        codes = self.codes.weight.to(z.dtype)
        nearest = torch.cdist(z.float(), codes.float()).argmin(1)
        one_hot = F.one_hot(nearest, len(codes)).to(z.dtype)
        found = one_hot @ codes
        if self.training:
            mix = 1 - self.decay
            self.counts = self.counts * self.decay + mix * one_hot.sum(0)
            self.sums = nn.Parameter(self.sums * self.decay + mix * one_hot.t() @ z)
            self.codes.weight = nn.Parameter(self.sums / self.counts[:, None])
        return z + (found - z).detach(), F.mse_loss(found.detach(), z)


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 3)
        self.quantizer = VectorQuantizer(5, 3)
        self.decoder = nn.Linear(3, 6)

    def forward(self, x):
        quantized, commitment = self.quantizer(self.encoder(x))
        return self.decoder(quantized), commitment


model = VQVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x), batch_size=8, shuffle=False
)

for epoch in range(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        reconstructed, commitment = model(inputs)
        loss = F.mse_loss(reconstructed, inputs) + 0.25 * commitment
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    result = model(x[:4].to(device))[0]
