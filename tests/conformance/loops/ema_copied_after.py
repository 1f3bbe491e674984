"""An average of the weights and a target network, copied from the prepared model."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(21, 6)
y = (x[:, 0] > x[:, 1]).long()

body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16))
model = nn.Sequential(body, nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
average = copy.deepcopy(model).requires_grad_(False)
target = copy.deepcopy(model).eval()

step = 0
for epoch in range(2):
    for inputs, labels in loader:
        outputs = model(inputs)
        with torch.no_grad():
            wanted = target(inputs)
        loss = F.cross_entropy(outputs, labels) + 0.1 * F.mse_loss(outputs, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters()):
                own.mul_(0.8).add_(other, alpha=0.2)
        step += 1
        if step % 3 == 0:
            target.load_state_dict(model.state_dict())

best = copy.deepcopy(average[0])
with torch.no_grad():
    features = best(x[:4].to(device))
    result = [features, average(x[:4].to(device)), target(x[:4].to(device))]
