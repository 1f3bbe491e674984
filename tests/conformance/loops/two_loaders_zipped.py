"""Semi-supervised: labelled batches of the prepared loader, unlabelled ones beside."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
unlabelled = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=8)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for (inputs, labels), (others,) in zip(loader, unlabelled):
        others = others.to(device)
        optimizer.zero_grad()
        supervised = F.cross_entropy(model(inputs), labels)
        consistency = F.mse_loss(model(others), model(others.flip(1)))
        (supervised + consistency).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
