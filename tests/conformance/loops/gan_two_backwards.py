"""DCGAN as the tutorial has it: real and fake each have a backward of their own."""

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
        optimizerD.zero_grad()
        errD_real = criterion(netD(real), torch.ones(len(z), 1, device=device))
        errD_real.backward()
        fake = netG(z)
        errD_fake = criterion(
            netD(fake.detach()), torch.zeros(len(z), 1, device=device)
        )
        errD_fake.backward()
        optimizerD.step()

        optimizerG.zero_grad()
        errG = criterion(netD(fake), torch.ones(len(z), 1, device=device))
        errG.backward()
        optimizerG.step()

with torch.no_grad():
    made = netG(noise[:4].to(device))
    result = [made, netD(made)]
