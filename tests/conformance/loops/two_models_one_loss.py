"""PyTorch's seq2seq tutorial: encoder and decoder, each with its own optimizer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
data = TensorDataset(x)

encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))
encoder_optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5)
decoder_optimizer = torch.optim.SGD(decoder.parameters(), lr=0.3)
encoder, encoder_optimizer, loader = prepare(
    encoder, encoder_optimizer, data, batch_size=8, shuffle=False
)
decoder, decoder_optimizer, _ = prepare(
    decoder, decoder_optimizer, data, batch_size=8, shuffle=False
)

for epoch in range(2):
    for (inputs,) in loader:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        loss = F.mse_loss(decoder(encoder(inputs)), inputs)
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()

with torch.no_grad():
    result = decoder(encoder(x[:4].to(device)))
