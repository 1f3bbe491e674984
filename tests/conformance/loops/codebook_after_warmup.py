"""An autoencoder that quantizes after an epoch of warm-up: its codes are means, which
forward moves."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)


class VectorQuantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(8, 4))
        self.quantizes = False

    def forward(self, x):
        z = self.encoder(x)
        if not self.quantizes:
            return self.decoder(z)
        nearest = (z[:, None] - self.codes).square().sum(-1).argmin(1)
        codes = self.codes[nearest]
        if self.training:
            chosen = F.one_hot(nearest, len(self.codes)).float()
            counts = chosen.sum(0)[:, None]
            means = chosen.to(z.dtype).T @ z.detach() / counts.clamp(min=1)
            moved = self.codes.lerp(means.to(self.codes.dtype), 0.5)
            self.codes = torch.where(counts > 0, moved, self.codes)
        return self.decoder(z + (codes - z).detach())


model = VectorQuantized()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x), batch_size=8, shuffle=False
)

for epoch in range(3):
    model.quantizes = epoch > 0
    for (inputs,) in loader:
        F.mse_loss(model(inputs), inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
