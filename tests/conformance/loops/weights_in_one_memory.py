"""An autoencoder whose decoder has a view of the encoder's weight as its own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 16)
        self.decoder = nn.Linear(16, 6)
        self.decoder.weight.data = self.encoder.weight.data.t()

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


x = torch.randn(24, 6)

model = Tied()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x), batch_size=8, shuffle=False
)

for epoch in range(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
