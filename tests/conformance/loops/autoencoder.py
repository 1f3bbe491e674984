"""An autoencoder: the batch is its own target."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.rand(24, 8)

model = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8), nn.Sigmoid())
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x), batch_size=8, shuffle=False
)

for epoch in range(2):
    for (inputs,) in loader:
        loss = F.binary_cross_entropy(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
