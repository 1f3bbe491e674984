"""A Fourier layer with complex weights, as of the Fourier neural operator."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 1, 16)
y = x.roll(2, -1)


class SpectralConv(nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(
            0.3 * torch.randn(channels, channels, modes, dtype=torch.cfloat)
        )

    def forward(self, x):
        found = torch.fft.rfft(x.float())[..., : self.modes]
        return torch.fft.irfft(torch.einsum("bim,iom->bom", found, self.weight), n=16)


model = nn.Sequential(nn.Conv1d(1, 4, 1), SpectralConv(4, 6), nn.Conv1d(4, 1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
