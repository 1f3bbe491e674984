"""PyTorch's DCGAN tutorial in small: two models, two optimizers."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

noise = torch.randn(24, 4)
real_samples = torch.randn(24, 2) * 0.5 + 2

netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.SGD(netD.parameters(), lr=0.2)
optimizerG = torch.optim.SGD(netG.parameters(), lr=0.5)
dataset = TensorDataset(noise, real_samples)
netG, optimizerG, loader = prepare(
    netG, optimizerG, dataset, batch_size=8, shuffle=False
)
netD, optimizerD, _ = prepare(netD, optimizerD, dataset, batch_size=8, shuffle=False)

for epoch in range(2):
    for z, real in loader:
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        fake = netG(z)
        real_loss = criterion(netD(real), torch.ones(len(z), 1, device=device))
        fake_loss = criterion(
            netD(fake.detach()), torch.zeros(len(z), 1, device=device)
        )
        (real_loss + fake_loss).backward()
        optimizerD.step()
        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
        loss = criterion(netD(fake), torch.ones(len(z), 1, device=device))
        loss.backward()
        optimizerG.step()

with torch.no_grad():
    made = netG(noise[:4].to(device))
    result = [made, netD(made)]
