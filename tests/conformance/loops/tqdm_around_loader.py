"""tqdm around the loader, with the loss in its postfix."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    with tqdm(loader, desc=f"epoch {epoch}", mininterval=60) as bar:
        for inputs, labels in bar:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.2f}")

with torch.no_grad():
    result = model(x[:4].to(device))
