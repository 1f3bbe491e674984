"""A loss that has weights (ArcFace, proxies), in the same optimizer as the model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class ProxyLoss(nn.Module):
    def __init__(self, num_classes, dim):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(num_classes, dim))

    def forward(self, embeddings, labels):
        return F.cross_entropy(-torch.cdist(embeddings, self.proxies), labels)


x = torch.randn(24, 6)
y = torch.randint(0, 3, (24,))

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
criterion = ProxyLoss(3, 4).to(device)
optimizer = torch.optim.SGD(
    [
        {"params": model.parameters()},
        {"params": criterion.parameters(), "lr": 0.5},
    ],
    lr=0.1,
)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), criterion.proxies.detach().clone()]
