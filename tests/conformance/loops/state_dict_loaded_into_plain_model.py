"""After training the weights go into a plain model, for inference."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def make_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

inference = make_model().to(device)
inference.load_state_dict(model.state_dict())
inference.eval()
with torch.no_grad():
    result = inference(x[:4].to(device))
