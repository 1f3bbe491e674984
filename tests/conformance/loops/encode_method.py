"""A method other than forward: model.encode(x), and a loss on what it gives."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)

    def forward(self, x):
        return self.decode(self.encode(x))


x = torch.randn(24, 6)
model = AutoEncoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x), batch_size=8, shuffle=False
)

for epoch in range(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        z = model.encode(inputs)
        loss = F.mse_loss(model.decode(z), inputs)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
