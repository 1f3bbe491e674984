"""One optimizer over an encoder and a decoder, chained (PyTorch's seq2seq tutorial)."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)

encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6)).to(device)
optimizer = torch.optim.SGD(
    itertools.chain(encoder.parameters(), decoder.parameters()), lr=0.5
)
encoder, optimizer, loader = prepare(
    encoder, optimizer, TensorDataset(x), batch_size=8, shuffle=False
)

for epoch in range(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(decoder(encoder(inputs)), inputs)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = decoder(encoder(x[:4].to(device)))
