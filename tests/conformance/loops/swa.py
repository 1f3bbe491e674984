"""torch.optim.swa_utils: an AveragedModel and SWALR."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

x = torch.randn(16, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

swa_model = AveragedModel(model)
swa_scheduler = SWALR(optimizer, swa_lr=0.1, anneal_epochs=2)
for epoch in range(4):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    if epoch > 0:
        swa_model.update_parameters(model)
        swa_scheduler.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), swa_model(x[:4].to(device))]
